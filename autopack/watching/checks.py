"""One check of a live call: what a document got in it, against what it gets alone in the stock model.

Of a padded batch it is what every token got, against what stock makes of the same batch.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopack.auditing.auditor import LOSS_TOLERANCE, TOLERANCE
from autopack.auditing.fields import Fields, chunks, fields_of, scale_of
from autopack.auditing.left_as_found import noise_of
from autopack.auditing.running import Runner
from autopack.calls.call import Call
from autopack.calls.encoder_decoder import PairCall
from autopack.calls.outputs import loss_of
from autopack.calls.sequence_parallel import rows_shared_by
from autopack.errors import Leak
from autopack.inspection import media
from autopack.inspection.randomness import draws_by_itself, state_of
from autopack.runtime.runs import Buffers
from autopack.watching import influence
from autopack.watching.conditions import precisions, unnoticed
from autopack.watching.document import CannotTell, Document, PaddedBatch, document_of

logger = logging.getLogger(__name__)

_TOLERANCE = {**TOLERANCE, torch.float64: 1e-5}
"""A good part of the models in float64 casts to float32 in code of its own."""
_OTHER_CHOICES = 0.1
"""The share of tokens that may have another whole number, such as that of their likeliest class, by rounding."""
_OTHER_EXPERTS = 0.1
"""A token at which two experts are all but equal may get the other one by rounding; half of a document does not."""
_ITEMS = "num_items_in_batch"


@dataclass
class Checks:
    """What checks of calls have found so far."""

    checks: int = 0
    """Documents, or padded batches, that were compared with what they get in the stock model, and calls of which none
    could be and gradients told."""
    worst: float = 0.0
    """The largest relative error that any of them showed."""
    leaks: int = 0
    """How many of them differed by more than rounding."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Checks that could not be made, by reason."""

    def check(self, call: Call, output: Any, packs: bool, step: int, turn: int, of_batch: bool = False) -> Leak | None:
        """Compare the document of a call whose `turn` it is, or a whole padded batch; the leak that there is."""
        checked: Document | PaddedBatch | None = None
        try:
            if not packs:
                raise CannotTell("the call packed nothing")
            if rows_shared_by(call) is not None:
                raise CannotTell("several ranks share its rows")
            checked = PaddedBatch.of(call) if of_batch else document_of(call, turn)
        except CannotTell as reason:
            # What ranks run together, one of them may not run once more.
            if packs and not of_batch and not call.model.groups and rows_shared_by(call) is None:
                return self._by_gradients(call, step, str(reason))
            self._skip(call, str(reason))
            if not call.model.groups:
                return None
        # Under FSDP every rank has to run its part, whether or not there is anything to compare.
        noisy = bool(noise_of(call.module)) or draws_by_itself(call.module)
        with unnoticed(call.module, call.model):
            runs = _Runs(call, checked, output, noisy)
        if checked is None:
            return None
        if runs.reason is not None:
            self._skip(call, runs.reason)
            return None
        leak = self._judged(call, checked, runs, step)
        if leak is None and not of_batch and not call.model.groups and media.given(call.arguments):
            leak = self._by_gradients(call, step)  # the document that was run has none of them
        return leak

    def _by_gradients(self, call: Call, step: int, why: str | None = None) -> Leak | None:
        """Find out by gradients whether documents meet; `why` says why none of them could be run alone."""
        try:
            leak = influence.leak_of(call, step)
        except CannotTell as reason:
            self._skip(call, str(reason) if why is None else f"{why}, and {reason}")
            return None
        self.checks += why is not None  # otherwise its document has been counted
        self.leaks += leak is not None
        return leak

    def _skip(self, call: Call, reason: str) -> None:
        if not self.skipped[reason]:
            logger.warning("autopack could not check a call of %s: %s", call.name, reason)
        self.skipped[reason] += 1

    def _judged(self, call: Call, checked: Document | PaddedBatch, runs: _Runs, step: int) -> Leak | None:
        parts = checked.split(runs.found, runs.alone)
        errors = {name: error_by_token(got, wanted) for name, (got, wanted) in parts.items() if wanted.numel()}
        if runs.losses is not None:
            errors["loss"] = runs.losses
        if not errors:
            self._skip(call, "no part of its output can be compared with what a document gets alone")
            return None
        tolerances = dict.fromkeys(errors, runs.tolerance) | {"loss": runs.loss_tolerance}
        for name, (_, wanted) in parts.items():
            # A choice between two that are all but equal may go the other way by rounding, at a few tokens.
            if name in errors and not wanted.is_floating_point():
                errors[name] *= float(errors[name].mean() > _OTHER_CHOICES or len(errors[name]) == 1)
        name = max(errors, key=lambda each: float(errors[each].max()) / tolerances[each])
        worst, tolerance = float(errors[name].max()), tolerances[name]
        if worst > tolerance and _routes(call.module) and float(errors[name].median()) <= _OTHER_EXPERTS:
            self._skip(call, "rounding may have chosen other experts for some tokens")
            return None
        self.checks += 1
        self.worst = max(self.worst, worst)
        if worst <= tolerance:
            return None
        self.leaks += 1
        return Leak(call.name, *checked.place_of(errors[name]), name, worst, tolerance, step)


class _Runs:
    """What a document gets alone, and what it got: in the live call, or where that drew noise, in one without."""

    def __init__(self, call: Call, document: Document | PaddedBatch | None, output: Any, noisy: bool):
        self.reason: str | None = None
        """Why nothing can be compared, where that is so."""
        self.losses: torch.Tensor | None = None
        """The error of the document's loss, (1,), where there is one to compare."""
        module: Any = call.module
        runner = Runner(module)
        whole = isinstance(document, PaddedBatch)
        weighs = noisy and isinstance(document, Document) and _has_a_loss_of_its_own(call)
        weighs = weighs and call.entry.foreign is None
        one = dict(call.arguments if document is None else document.arguments)
        if weighs:
            one.pop(_ITEMS, None)
        with precisions() as dtypes:
            if call.found is not None:
                call.found.renew()
            before, buffers = state_of(module), Buffers(module)
            try:
                alone = _alone(runner, one)
                draws, writes = state_of(module) != before, buffers.put_back()
                again = _alone(runner, one) if draws else alone
                if not weighs and _returns_loss_alone(call, document, output, alone):
                    weighs = True
                    one.pop(_ITEMS, None)
                    alone = _alone(runner, one)
                buffers.put_back()
                # Unless it is known what the live call began with, a run after it begins with something else.
                if weighs or noisy or draws or (writes and call.found is None):
                    output = module(**(_with_its_labels(call, document) if weighs else call.arguments))
            except Exception as error:
                # What somebody else's code makes of such a call must not end a training run that is exact.
                self.reason = f"running a document alone raised {type(error).__name__}: {error}"
                return
        self.alone, self.found = fields_of(alone), fields_of(output)
        self.tolerance = max((_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)
        self.loss_tolerance = max(self.tolerance, *(LOSS_TOLERANCE.get(d, 1e-3) for d in dtypes), 1e-3)
        if document is not None and draws and self._differs(fields_of(again)):
            self.reason = "its forward draws random numbers that autopack cannot switch off"
        if weighs or whole:
            self.losses = _error_of_losses(loss_of(output), loss_of(alone))

    def _differs(self, again: Fields) -> bool:
        pairs = [(again[name], value) for name, value in self.alone.items() if value.numel()]
        return any(float(error_by_token(one, other).max()) > self.tolerance for one, other in pairs)


def _alone(runner: Runner, arguments: dict[str, Any]) -> Any:
    """What stock gives a document: in its default call, or, where that raises, without a cache."""
    try:
        return runner.stock(arguments)
    except Exception:
        return runner.stock({**arguments, "use_cache": False})


def _has_a_loss_of_its_own(call: Call) -> bool:
    """Whether the loss of a call, with the labels of one document alone, is the loss of that document alone."""
    labels, inputs = call.arguments.get("labels"), call.inputs
    return (
        not isinstance(call, PairCall)
        and isinstance(labels, torch.Tensor)
        and isinstance(inputs, torch.Tensor)
        and not labels.is_floating_point()
        and labels.shape == inputs.shape[:2]
        and call.arguments.get("shift_labels") is None
        and call.model.proof.labels is None
        and not call.wants_router_loss
    )


def _returns_loss_alone(call: Call, document: Document | PaddedBatch | None, output: Any, alone: Any) -> bool:
    """Whether a loss that was proven is all that can be compared, as that of a head which makes no logits."""
    if not isinstance(document, Document) or not call.model.proof.source or not _has_a_loss_of_its_own(call):
        return False
    return not document.split(fields_of(output), fields_of(alone))


def _with_its_labels(call: Call, document: Any) -> dict[str, Any]:
    """The arguments of a call with no labels but those of the document."""
    side, labels = document.sides[0], call.arguments["labels"]
    kept = torch.zeros_like(labels, dtype=torch.bool)
    kept[side.row, torch.from_numpy(side.columns).to(labels.device)] = True
    return {name: value for name, value in call.arguments.items() if name != _ITEMS} | {
        "labels": labels.masked_fill(~kept, call.ignored_label)
    }


def _error_of_losses(found: torch.Tensor | None, alone: torch.Tensor | None) -> torch.Tensor | None:
    if found is None or alone is None or not bool(alone.isfinite()):
        return None  # a document without a label that counts
    error = (found - alone).abs().double() / max(1.0, float(alone.abs()))
    return error.nan_to_num(math.inf, posinf=math.inf).reshape(1)


def _routes(model: nn.Module) -> bool:
    """Whether tokens choose experts."""
    return any("experts" in module._modules or "Expert" in type(module).__name__ for module in model.modules())


def error_by_token(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The error at each token of two tensors (tokens, ...), relative to the deviation of all of `expected`: (tokens,).

    It is the root mean square over the channels of a token, in which rounding, other than leaked context, does not grow
    with their number. Infinite where one is no number and the other is. Of whole numbers it is 1 where they differ.
    """
    if not expected.is_floating_point():
        return (found != expected).reshape(len(expected), -1).any(1).double()
    errors = []
    for one, other in zip(chunks(found), chunks(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        errors.append((one - other).masked_fill_(same, 0.0).square_().mean(1).sqrt_())
    return torch.cat(errors).nan_to_num(math.inf, posinf=math.inf) / scale_of([expected])

"""Watch the training calls of one model: now and then a document is run alone, and compared with what it got."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from autopack.auditing.auditor import LOSS_TOLERANCE, TOLERANCE
from autopack.auditing.fields import Fields, fields_of
from autopack.auditing.left_as_found import noise_of
from autopack.auditing.running import Runner
from autopack.calls.call import Call
from autopack.calls.encoder_decoder.pairs import PairCall
from autopack.calls.outputs import loss_of, unread
from autopack.calls.sequence_parallel import rows_shared_by
from autopack.errors import Leak, LeakDetected
from autopack.inspection.sharding import in_a_group
from autopack.watching.conditions import Precision, random_state, unnoticed
from autopack.watching.differences import error_by_token
from autopack.watching.document import CannotTell, Document, document_of

logger = logging.getLogger(__name__)

_TOLERANCE = {**TOLERANCE, torch.float64: 1e-5}
"""A good part of the models in float64 casts to float32 in code of its own."""
_OTHER_EXPERTS = 0.1
"""A token at which two experts are all but equal may get the other one by rounding; half of a document does not."""
_ITEMS = "num_items_in_batch"


@dataclass
class Watched:
    """What a sentinel has found so far."""

    every: int
    """Number of training calls from one check to the next."""
    checks: int = 0
    """Documents that were compared with what they get alone."""
    worst: float = 0.0
    """The largest relative error that any of them showed."""
    leaks: int = 0
    """How many of them differed by more than rounding."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Checks that could not be made, by reason."""

    def __str__(self) -> str:
        found = f"every {self.every} training calls; {self.checks} checked, worst relative error {self.worst:.1e}"
        found += f", {self.leaks} leaking" if self.leaks else ""
        return "; ".join([found, *(f"{count} skipped: {reason}" for reason, count in self.skipped.most_common())])


class Sentinel:
    """Counts the training calls of one model and checks every N-th. It holds no part of the model."""

    def __init__(self, every: int, action: str):
        self.action = action
        self.watched = Watched(every)
        self._calls = 0

    def __call__(self, call: Call, output: Any, packs: bool) -> None:
        """Count a call of the whole model, once it has run; raises `LeakDetected` where a check finds a leak."""
        if not call.module.training or not torch.is_grad_enabled() or call.model.is_settling or _is_recorded(call):
            return
        # Ranks must agree on when to check, and each has batches of its own.
        if not packs and not in_a_group():
            return
        self._calls += 1
        if self._calls % self.watched.every:
            return
        leak = self._check(call, output, packs)
        if leak is None:
            return
        self.watched.leaks += 1
        if self.action == "raise":
            raise LeakDetected(leak)
        logger.warning("autopack found a leak: %s", leak)

    def _check(self, call: Call, output: Any, packs: bool) -> Leak | None:
        document: Document | None = None
        try:
            if not packs:
                raise CannotTell("the call packed nothing")
            if rows_shared_by(call) is not None:
                raise CannotTell("several ranks share its rows")
            document = document_of(call, self._calls // self.watched.every - 1)
        except CannotTell as reason:
            self._skip(call, str(reason))
            if not call.model.groups:
                return None
        # Under FSDP every rank has to run its part, whether or not there is anything to compare.
        noisy = bool(noise_of(call.module))
        with unnoticed(call.module, call.model):
            runs = _Runs(call, document, output, noisy)
        if document is None:
            return None
        if runs.reason is not None:
            self._skip(call, runs.reason)
            return None
        return self._judged(call, document, runs)

    def _skip(self, call: Call, reason: str) -> None:
        if not self.watched.skipped[reason]:
            logger.warning("autopack could not check a training call of %s: %s", call.name, reason)
        self.watched.skipped[reason] += 1

    def _judged(self, call: Call, document: Document, runs: _Runs) -> Leak | None:
        errors = _errors(document, runs.found, runs.alone)
        if runs.losses is not None:
            errors["loss"] = runs.losses
        if not errors:
            self._skip(call, "no part of its output can be compared with what a document gets alone")
            return None
        tolerances = dict.fromkeys(errors, runs.tolerance) | {"loss": runs.loss_tolerance}
        name = max(errors, key=lambda each: float(errors[each].max()) / tolerances[each])
        worst, tolerance = float(errors[name].max()), tolerances[name]
        if worst > tolerance and _routes(call.module) and float(errors[name].median()) <= _OTHER_EXPERTS:
            self._skip(call, "rounding may have chosen other experts for some tokens")
            return None
        self.watched.checks += 1
        self.watched.worst = max(self.watched.worst, worst)
        if worst <= tolerance:
            return None
        number, row, columns = document.place
        return Leak(call.name, number, row, columns, name, worst, tolerance, self._calls)


class _Runs:
    """What a document gets alone, and what it got: in the live call, or where that drew noise, in one without."""

    def __init__(self, call: Call, document: Document | None, output: Any, noisy: bool):
        self.reason: str | None = None
        """Why nothing can be compared, where that is so."""
        self.losses: torch.Tensor | None = None
        """The error of the document's loss, (1,), where there is one to compare."""
        module: Any = call.module
        runner = Runner(module)
        weighs = document is not None and noisy and _has_a_loss_of_its_own(call)
        one = dict(call.arguments if document is None else document.arguments)
        if weighs:
            one.pop(_ITEMS, None)
        with Precision() as precision:
            before = random_state(module)
            try:
                alone = _alone(runner, one)
                draws = random_state(module) != before
                again = _alone(runner, one) if draws else alone
                if noisy or draws:
                    output = module(**(_with_its_labels(call, document) if weighs and document else call.arguments))
            except Exception as error:
                # What somebody else's code makes of such a call must not end a training run that is exact.
                self.reason = f"running a document alone raised {type(error).__name__}: {error}"
                return
        self.alone, self.found = fields_of(alone), fields_of(unread(output))
        self.tolerance = max((_TOLERANCE.get(dtype, 1e-4) for dtype in precision.dtypes), default=1e-4)
        self.loss_tolerance = max(self.tolerance, *(LOSS_TOLERANCE.get(d, 1e-3) for d in precision.dtypes), 1e-3)
        if document is not None and draws and self._differs(fields_of(again)):
            self.reason = "its forward draws random numbers that autopack cannot switch off"
        if weighs:
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


def _errors(document: Document, found: Fields, alone: Fields) -> dict[str, torch.Tensor]:
    """For each field the error at each token of the document, relative to the field's deviation: (tokens,)."""
    parts = document.split(found, alone)
    return {name: error_by_token(got, wanted) for name, (got, wanted) in parts.items() if wanted.numel()}


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
        and call.entry.foreign is None
        and call.model.proof.labels is None
        and not call.wants_router_loss
    )


def _with_its_labels(call: Call, document: Document) -> dict[str, Any]:
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


def _is_recorded(call: Call) -> bool:
    """Whether the call is recorded, stands for many or has no values, so that nothing else may be run beside it."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        or isinstance(call.inputs, FakeTensor)
        or (call.inputs is not None and call.inputs.is_meta)
    )


def _routes(model: nn.Module) -> bool:
    """Whether tokens choose experts."""
    return any("experts" in module._modules or "Expert" in type(module).__name__ for module in model.modules())

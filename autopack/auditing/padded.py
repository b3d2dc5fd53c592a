"""Padded batches of an enabled model against stock's: all fields, losses and gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from autopack.auditing.cases import PADDED_MODES, NoReference
from autopack.auditing.compare import Fields, errors_between, gradient_error, relative_error, scales_of
from autopack.auditing.fields import Sides, WrongShape, fields_of
from autopack.auditing.losses import Labels, expected_losses
from autopack.auditing.packed import PackedRuns
from autopack.auditing.report import ROUTER, ModeResult
from autopack.auditing.running import weighted_sum
from autopack.calls.outputs import loss_of, parts_of
from autopack.errors import AutopackError
from autopack.runtime.model import EnabledModel

_WANTED = {"output_router_logits": True}
_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")


@dataclass
class _PaddedAnswer:
    """A padded batch's results: all fields, each document's, and the loss, with their graph."""

    fields: Fields
    documents: list[Fields]
    loss: torch.Tensor | None

    @property
    def total(self) -> torch.Tensor | None:
        """The loss to differentiate, or else a weighted sum of all results."""
        return weighted_sum(self.documents, scales_of(self.documents)) if self.loss is None else self.loss


class PaddedRuns:
    """Padded batches of one model in one training mode, with the documents of its packed rows."""

    def __init__(self, packed: PackedRuns, labels: Labels | None):
        self.runner, self.case, self.labels, self.report = packed.runner, packed.case, labels, packed.report

    def measure(self, name: str, differentiate: bool) -> ModeResult:
        """Run one kind of padded batch, also as stock; raise `NoReference` if stock cannot."""
        enabled = self.runner.enabled
        assert enabled is not None, "padded batches of stock are stock's"
        arguments, sides = self._given(PADDED_MODES[name])
        training, before = self.runner.model.training, enabled.tally.batches
        try:
            found = _answer(self.runner.model(**arguments), sides)
        except Exception as error:
            self._reference(arguments, sides)  # stock may not run it either
            return ModeResult(name, training, kind="padded", failure=f"{type(error).__name__}: {error}")
        unpadded = enabled.tally.batches > before
        expected = self._reference(self._without_dropped(arguments, sides) if unpadded else arguments, sides)
        for field, value in expected.fields.items():
            shape = tuple(found.fields[field].shape) if field in found.fields else None
            if shape != tuple(value.shape):
                said = f"{field} has shape {shape}; stock gives {tuple(value.shape)}"
                return ModeResult(name, training, kind="padded", failure=said)
        result = self._compare(name, found, expected, differentiate, unpadded)
        if not self.report.is_exact(result) and self._reads_padding(enabled):
            # Where tokens get something of what stands in padding, stock's batch says nothing of them, but that alone.
            alone = self._alone(arguments, sides, expected)
            other = alone and self._compare(name, found, alone, differentiate, unpadded)
            return other if other and self.report.is_exact(other) else result
        return result

    def _reads_padding(self, enabled: EnabledModel) -> bool:
        traits = enabled.traits
        reads = traits.recurs or traits.reads_padding or traits.counts_columns
        # By flash kernels upstream lets a decoder see the padding of its encoder.
        of_encoder = self.case.is_pair and "flash" in self.report.implementation
        return reads or of_encoder or enabled.anatomy.has_row_dependent_rotary

    def _without_dropped(self, arguments: dict[str, Any], sides: Sides) -> dict[str, Any]:
        """Return the arguments without labels of tokens behind padding, which autopack leaves out.

        Stock compares them with what padding predicts.
        """
        if self.labels is None or "labels" not in arguments:
            return arguments
        promised = self.labels.padded(sides, predicted=True)
        if torch.equal(promised["labels"], arguments["labels"]):
            return arguments
        self.report.notes["labels behind padding"] = (
            "compared with stock without the terms in which it scores them by what it predicts at padding"
        )
        return arguments | promised

    @torch.no_grad()
    def measure_router(self) -> ModeResult:
        """Compare all numbers beside results: packed with and without padding, and padded.

        A router is balanced over all tokens of a batch, so documents alone say nothing of it. Raises
        `NoReference` if stock counts padding in it.
        """
        case, labels, training = self.case, self.labels, self.runner.model.training
        if labels is None:
            raise NoReference("there are no labels that its loss takes")
        given, other = (self._given({}, filler)[0] | _WANTED for filler in (None, case.other_filler))
        try:
            expected, changed = (_numbers(self.runner.stock(arguments)) for arguments in (given, other))
        except Exception as error:
            raise NoReference(f"stock raises {type(error).__name__} for the padded batch") from error
        if not expected or not all(map(torch.isfinite, expected.values())):
            raise NoReference("stock gives no numbers for the loss of the padded batch")
        if _error(changed, expected) > 1e-6:
            raise NoReference("stock counts padding in it, so that a padded batch says nothing")
        packed = (case.packed(name) for name in ("default", "padding mask"))
        worst, refused = 0.0, None
        for arguments in [*(case.given(call) | labels.packed(call) | _WANTED for call in packed), given]:
            try:
                worst = max(worst, _error(_numbers(self.runner.model(**arguments)), expected))
            except AutopackError as failure:
                refused = f"{type(failure).__name__}: {failure}"
            except Exception as failure:
                return ModeResult(ROUTER, training, failure=f"{type(failure).__name__}: {failure}")
        return ModeResult(ROUTER, training, None, None, None, worst, loss_refused=refused)

    def _reference(self, arguments: dict[str, Any], sides: Sides) -> _PaddedAnswer:
        """Return stock's results, or raise `NoReference` if it raises or gives no numbers."""
        try:
            found = _answer(self.runner.stock(arguments), sides)
        except Exception as error:
            raise NoReference(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        if any(bool(value.isnan().any()) for document in found.documents for value in document.values()):
            raise NoReference("stock gives values that are no numbers")
        return found

    def _given(self, form: dict[str, Any], filler: int | None = None) -> tuple[dict[str, Any], Sides]:
        """Return the arguments of a form of padded batch, and the places of its documents."""
        call = self.case.padded(form.get("side", "right"), filler)
        arguments, sides = call.arguments, call.sides
        arguments |= self.case.without_router | {name: form[name] for name in form if name == "use_cache"}
        if self.labels is not None and form.get("labels", True):
            arguments |= self.labels.padded(sides)
            if form.get("tokens_of_labels") and self.labels.per_token:
                arguments = _called_as((), arguments)
        return arguments, sides

    def _compare(
        self, name: str, found: _PaddedAnswer, expected: _PaddedAnswer, differentiate: bool, unpadded: bool
    ) -> ModeResult:
        pairs = zip(found.documents, expected.documents, strict=True)
        one = _PaddedAnswer({}, [{n: got[n] for n in wanted} for got, wanted in pairs], found.loss)
        error, where = max(errors_between(one.documents, expected.documents, scales_of(expected.documents)))
        loss = gradient = None
        if expected.loss is not None:
            loss = math.inf if found.loss is None else relative_error(found.loss, expected.loss)
        if differentiate and (found.loss is None) == (expected.loss is None):
            gradient = self._gradient_error(one.total, expected.total)
        training = self.runner.model.training
        return ModeResult(name, training, error, None, gradient, loss, kind="padded", field=where, unpadded=unpadded)

    def _gradient_error(self, total: torch.Tensor | None, wanted: torch.Tensor | None) -> float | None:
        """Return the error of gradients; None where stock has none, or none that are numbers.

        Its backward fails after its own writes (Splinter), and windows in which a token of padding sees nothing give
        none (softmax of nothing, float64).
        """
        if total is None or wanted is None or not wanted.requires_grad:
            return None
        with suppress(RuntimeError):
            gradients = self.runner.gradients(wanted)
            if gradients and all(bool(each.isfinite().all()) for each in (wanted, *gradients)):
                return gradient_error(self.runner.gradients(total), gradients)
        return None

    def _alone(self, arguments: dict[str, Any], sides: Sides, expected: _PaddedAnswer) -> _PaddedAnswer | None:
        """Return the documents' results alone, in the form of a padded batch's answer."""
        labels = None if expected.loss is None else self.labels
        calls = [self.case.by_itself(number) for number in range(sides.count)]
        if labels is not None:
            calls = [call | of_one | self.case.without_router for call, of_one in zip(calls, labels.alone, strict=True)]
        outputs = [self.runner.stock(_called_as(arguments, call)) for call in calls]
        losses = [each for output in outputs if (each := loss_of(output)) is not None]
        if labels is not None and len(losses) < len(outputs):
            return None
        fields = {name: value for name, value in expected.fields.items() if value.dim()}
        with suppress(WrongShape):
            _, documents, _ = sides.split(fields, [fields_of(output) for output in outputs])
            loss = None if labels is None else expected_losses(losses, labels.counts)[0]
            return _PaddedAnswer({}, documents, loss)
        return None


def _answer(output: Any, sides: Sides) -> _PaddedAnswer:
    fields = fields_of(output)
    parts = {name: sides.parts(name, value) for name, value in fields.items()}
    documents = [{name: each[number] for name, each in parts.items()} for number in range(sides.count)]
    return _PaddedAnswer(fields, documents, loss_of(output))


def _called_as(like: Collection[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without decoder tokens if another call has them made of its labels."""
    return {name: value for name, value in arguments.items() if name not in _OF_DECODER or name in like}


def _numbers(output: Any) -> dict[Any, torch.Tensor]:
    """Return the loss of an output, and all other single numbers in it."""
    parts = {**parts_of(output), "loss": loss_of(output)}
    numbers = {name: value for name, value in parts.items() if isinstance(value, torch.Tensor) and not value.dim()}
    return {name: value for name, value in numbers.items() if value.is_floating_point()}


def _error(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> float:
    return max(relative_error(found[name], value) if name in found else math.inf for name, value in expected.items())

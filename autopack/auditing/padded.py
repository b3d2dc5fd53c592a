"""Padded batches of an enabled model against stock's: all fields, losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from autopack.auditing.asking import loss_of
from autopack.auditing.cases import MODES, PADDED_MODES, Case, NoReference
from autopack.auditing.fields import Fields, Sides, WrongShape, errors_between, fields_of, scales_of
from autopack.auditing.gradients import Gradients
from autopack.auditing.losses import Labels, expected_losses, relative_error
from autopack.auditing.report import ROUTER, ModeResult
from autopack.auditing.running import Runner, weighted_sum
from autopack.errors import AutopackError
from autopack.layout.forms import columns_of, rows_first

_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")


@dataclass
class _Answer:
    """A padded batch's results: all fields, each document's, and the loss, with their graph."""

    fields: Fields
    documents: list[Fields]
    loss: torch.Tensor | None
    gradients: Gradients | None = None
    """Gradients of the total, once they have been made."""

    def total(self, scales: dict[str, float]) -> torch.Tensor | None:
        """Return the loss to differentiate, or else a weighted sum of all results."""
        return weighted_sum(self.documents, scales) if self.loss is None else self.loss


class PaddedRuns:
    """Padded batches of one model in one training mode."""

    def __init__(
        self,
        runner: Runner,
        case: Case,
        labels: Labels | None,
        alone: Callable[[], list[Fields]],
        is_exact: Callable[[ModeResult], bool],
        tolerance: float,
    ):
        self.runner, self.case, self.labels, self.alone, self.is_exact = runner, case, labels, alone, is_exact
        self.tolerance = tolerance
        self.notes: dict[str, str] = {}

    def measure(self, name: str, differentiate: bool) -> ModeResult:
        """Run one kind of padded batch, also as stock; raise `NoReference` if stock cannot."""
        form, training = PADDED_MODES[name], self.runner.model.training
        arguments, sides = self._given(form)
        expected = self._reference(arguments, sides, differentiate)
        # A label of a token behind padding is compared with what padding predicts; autopack leaves that out.
        promised = {} if self.labels is None or not form.get("labels", True) else self.labels.padded(sides, True)
        dropped = any(not torch.equal(value, arguments[name]) for name, value in promised.items())
        without = self._reference({**arguments, **promised}, sides, differentiate) if dropped else None
        tally = self.runner.enabled.tally.batches  # type: ignore[union-attr]
        try:
            found = self._answer(self.runner.run(**arguments), sides, expected)
        except Exception as error:
            return ModeResult(name, training, kind="padded", failure=f"{type(error).__name__}: {error}")
        unpadded = self.runner.enabled.tally.batches > tally  # type: ignore[union-attr]
        if unpadded and without is not None:
            expected = without
            self.notes["labels behind padding"] = (
                "compared with stock without the terms in which it scores them by what it predicts at padding"
            )
        result = self._compare(name, found, expected, differentiate, unpadded)
        if self.is_exact(result):
            return result
        # Where tokens get something of what stands in padding, stock's batch says nothing of them, but that alone.
        alone = self._alone(arguments, sides, with_loss=expected.loss is not None)
        if alone is not None and self._stock_reads_padding(form, expected, alone):
            other = self._compare(name, found, alone, differentiate, unpadded)
            if self.is_exact(other):
                return other
        return result

    def _reference(self, arguments: dict[str, Any], sides: Sides, differentiate: bool) -> _Answer:
        """Return stock's results, or raise `NoReference` if it raises or gives no numbers."""
        try:
            found = self._answer(self.runner.stock(arguments), sides)
        except Exception as error:
            raise NoReference(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        if any(bool(value.isnan().any()) for document in found.documents for value in document.values()):
            raise NoReference("stock gives values that are no numbers")
        return found

    def _given(self, form: dict[str, Any], filler: int | None = None) -> tuple[dict[str, Any], Sides]:
        """Return the arguments of a form of padded batch, and the places of its documents."""
        arguments: dict[str, Any] = {**self.case.padded(form.get("side", "right"), filler)}
        sides = Sides.of_padded(arguments)
        arguments |= self.case.without_router | {name: form[name] for name in form if name == "use_cache"}
        if self.labels is not None and form.get("labels", True):
            arguments |= self.labels.padded(sides)
            if form.get("tokens_of_labels") and self.case.is_pair and self.labels.per_token:
                arguments = _called_as((), arguments)
        return arguments, sides

    def _answer(self, output: Any, sides: Sides, like: _Answer | None = None) -> _Answer:
        fields = fields_of(output)
        if like is not None:
            for name, wanted in like.fields.items():
                shape = tuple(fields[name].shape) if name in fields else None
                if shape != tuple(wanted.shape):
                    raise WrongShape(f"{name} has shape {shape}; stock gives {tuple(wanted.shape)}")
        return _Answer(fields, _documents(fields, sides), loss_of(output))

    def _compare(self, name: str, found: _Answer, expected: _Answer, differentiate: bool, unpadded: bool) -> ModeResult:
        documents = [
            {n: each[n] for n in wanted} for each, wanted in zip(found.documents, expected.documents, strict=True)
        ]
        scales = scales_of(expected.documents)
        error, where = max(errors_between(documents, expected.documents, scales))
        loss = gradient = None
        if expected.loss is not None:
            loss = float("inf") if found.loss is None else relative_error(found.loss, expected.loss)
        if differentiate and (found.loss is None) == (expected.loss is None):
            one = _Answer(found.fields, documents, found.loss).total(scales)
            wanted = self._gradients_of_stock(expected)
            # Windows in which a token of padding sees nothing give stock none (softmax of nothing, float64).
            if one is not None and wanted is not None and wanted.are_finite():
                gradient = self.runner.gradients(one).error(wanted)
        training = self.runner.model.training
        return ModeResult(name, training, error, None, gradient, loss, kind="padded", field=where, unpadded=unpadded)

    def _gradients_of_stock(self, expected: _Answer) -> Gradients | None:
        """Return stock's gradients; None if its backward fails after its own writes (Splinter)."""
        if expected.gradients is None and self.runner.parameters():
            total = expected.total(scales_of(expected.documents))
            if total is not None and total.requires_grad and bool(total.isfinite()):
                with suppress(RuntimeError):
                    expected.gradients = self.runner.gradients(total)
        return expected.gradients

    @torch.no_grad()
    def _stock_reads_padding(self, form: dict[str, Any], expected: _Answer, alone: _Answer) -> bool:
        """Return True if stock's results change with tokens in padding, or padding behind."""
        filler = self.case.filler if self.case.other_filler is None else self.case.other_filler
        for before, other_form, other_filler in ((expected, form, filler), (alone, {**form, "side": "right"}, None)):
            arguments, sides = self._given(other_form, other_filler)
            try:
                after = self._answer(self.runner.stock(arguments), sides)
            except Exception:
                continue  # a batch of that form cannot be run, and says nothing
            known = [
                {n: value for n, value in one.items() if n in other and other[n].shape == value.shape}
                for one, other in zip(before.documents, after.documents, strict=True)
            ]
            if max(errors_between(after.documents, known, scales_of(known)))[0] > self.tolerance:
                return True
        return False

    def _alone(self, arguments: dict[str, Any], sides: Sides, with_loss: bool) -> _Answer | None:
        """Return the documents' results alone, in the form of a padded batch's answer."""
        loss = None
        if self.labels is None or not with_loss:
            by_itself = self.alone()
        else:
            outputs = [
                self.runner.stock(
                    _called_as(arguments, {**self.case.by_itself(i), **labels, **self.case.without_router})
                )
                for i, labels in enumerate(self.labels.alone)
            ]
            losses = [found for output in outputs if (found := loss_of(output)) is not None]
            if len(losses) < len(outputs):
                return None
            by_itself = [fields_of(output) for output in outputs]
            loss = expected_losses(losses, self.labels.counts)[0]
        documents: list[Fields] = [{} for _ in by_itself]
        for name in by_itself[0]:
            parts = [fields[name] for fields in by_itself]
            axis = columns_of(parts, [(1, length) for length in sides.lengths])
            if axis is not None:
                parts = [rows_first(part, axis) for part in parts]
            elif not all(part.dim() and len(part) == 1 and part.shape == parts[0].shape for part in parts):
                continue
            for document, part in zip(documents, parts, strict=True):
                document[name] = part[0]
        return _Answer({}, documents, loss)


def _called_as(like: Collection[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without decoder tokens if another call has them made of its labels."""
    return {name: value for name, value in arguments.items() if name not in _OF_DECODER or name in like}


def _documents(fields: Fields, sides: Sides) -> list[Fields]:
    """Return each document's part of fields, without padding; the first gets all the rest."""
    documents: list[Fields] = [{} for _ in sides.columns]
    for name, value in fields.items():
        if value.dim() == 0:
            for document in documents:
                document[name] = value
            continue
        axes = [(side, axis) for side in sides.both if (axis := columns_of([value], [side.shape])) is not None]
        flat = next((side for side in sides.both if len(value) == side.shape[0] * side.shape[1]), None)
        if axes:
            side, axis = axes[0]
            parts = side.per_token(name, rows_first(value, axis))
        elif flat is not None:
            parts = flat.flat(name, value)
        elif len(value) == len(documents):
            parts = list(value)
        else:
            parts = [value] * len(documents)
        for document, part in zip(documents, parts, strict=True):
            document[name] = part
    return documents


_WANTED = {"output_router_logits": True}


@torch.no_grad()
def measure_router(runner: Runner, case: Case, labels: Labels | None, pads: bool) -> ModeResult:
    """Compare all numbers beside results: packed with and without padding, and padded.

    Padded batches are compared if it `pads`. A router is balanced over all tokens of a batch, so
    documents alone say nothing of it. Raises `NoReference` if stock counts padding in it.
    """
    training = runner.model.training
    if labels is None:
        raise NoReference("there are no labels that its loss takes")
    given = _padded(case, labels)
    try:
        expected = _numbers(runner.stock(given))
        changed = _numbers(runner.stock(_padded(case, labels, case.other_filler)))
    except Exception as error:
        raise NoReference(f"stock raises {type(error).__name__} for the padded batch") from error
    if not expected:
        raise NoReference("stock gives no loss for the padded batch")
    if _error(changed, expected) > 1e-6:
        raise NoReference("stock counts padding in it, so that a padded batch says nothing")
    calls = [
        {**case.given(call), **labels.packed(call)} for call in (MODES[n](case) for n in ("default", "padding mask"))
    ]
    worst, refused = 0.0, None
    for call in [*calls, *([given] if pads else [])]:
        try:
            worst = max(worst, _error(_numbers(runner.run(**{**call, **_WANTED})), expected))
        except AutopackError as failure:
            refused = f"{type(failure).__name__}: {failure}"
        except Exception as failure:
            return ModeResult(ROUTER, training, failure=f"{type(failure).__name__}: {failure}")
    return ModeResult(ROUTER, training, None, None, None, worst, loss_refused=refused)


def _padded(case: Case, labels: Labels, filler: int | None = None) -> dict[str, Any]:
    padded: dict[str, Any] = dict(case.padded(filler=filler))
    return {**padded, **labels.padded(Sides.of_padded(padded)), **_WANTED}


def _numbers(output: Any) -> dict[str, torch.Tensor]:
    """Return the loss of an output, and all other single numbers in it."""
    pairs = output.items() if isinstance(output, dict) else enumerate(output) if isinstance(output, tuple) else ()
    found = {
        str(name): value
        for name, value in pairs
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.dim()
    }
    loss = loss_of(output)
    return found if loss is None else {**found, "loss": loss}


def _error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if found.keys() < expected.keys():
        return float("inf")
    return max(relative_error(found[name], value) for name, value in expected.items())

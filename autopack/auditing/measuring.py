"""Measure one form of call: packed rows beside stock's documents alone, padded batches beside
stock's own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from autopack.auditing.asking import Labels, expected_losses
from autopack.auditing.cases import FORMS, Case, Form, Input, NoReference
from autopack.auditing.compare import (
    Fields,
    errors_between,
    gradient_error,
    relative_error,
    scales_of,
)
from autopack.auditing.fields import Sides, WrongShape, fields_of
from autopack.auditing.report import LeakReport, ModeResult
from autopack.auditing.running import (
    gradients_of,
    in_used_tensors,
    run_as_stock,
    trained,
    weighted_sum,
)
from autopack.calls.outputs import loss_of
from autopack.errors import AutopackError, UnsupportedModel
from autopack.runtime.marks import enabled_in
from autopack.runtime.model import EnabledModel

_ITEMS = "num_items_in_batch"
_MADE_OF_LABELS: dict[str, Any] = {"decoder_input_ids": None}
"""Arguments of an encoder-decoder that makes its decoder's tokens of labels."""


@dataclass
class _Results:
    """The results of each document of a call, and the loss of all, with their graph."""

    documents: list[Fields]
    loss: torch.Tensor | None = None


class Measuring:
    """Calls of one model in every form. Stock runs once for all forms that need it."""

    def __init__(self, model: PreTrainedModel, case: Case, report: LeakReport):
        """Take a model and its documents; what is not measured is noted in the `report`."""
        self.model, self.case, self.report = model, case, report
        self.others: dict[str, Case] = {}
        """The documents of forms that have some of their own."""
        self.enabled = enabled_in(model)
        self.labels: Labels | None = None
        """Labels that the loss takes; None if none were found."""
        self._kept: dict[Any, tuple[Fields, torch.Tensor | None]] = {}

    def case_of(self, name: str) -> Case:
        """Return the documents of a form."""
        return self.others.get(name, self.case)

    def measure(self, name: str, differentiate: bool, replaces: bool) -> ModeResult:
        """Run one form of call; raise `NoReference` if stock cannot run that.

        If it `replaces`, documents are replaced one at a time, and labels are given in every way.
        """
        if FORMS[name].is_padded:
            return self._padded(name, differentiate)
        return self._packed(name, differentiate, replaces)

    def alone(self, case: Case, call: Input, **more: Any) -> list[Fields]:
        """Return stock's results for every document of a call by itself."""
        return [self._alone(case, call, number, **more)[0] for number in range(len(call.first))]

    def _alone(
        self, case: Case, call: Input, number: int, labels: Labels | None = None, **more: Any
    ) -> tuple[Fields, torch.Tensor | None]:
        """Return stock's results and loss for a document of a call, with their graph.

        It has `more` arguments than its own and labels. A document that stands in two rows has a
        graph for each: where upstream goes through float32, gradients of two uses round otherwise
        than the sum of each."""
        own = number if labels is None else number % len(case.documents)
        key = own, call.first[number], id(case), self.model.training, labels is not None, *more
        if key not in self._kept:
            given = case.alone(call, number)
            if labels is not None:
                given |= labels.alone[own] | case.without_router
            output = run_as_stock(self.model, _without_none(given | more))
            self._kept[key] = fields_of(output), loss_of(output)
        return self._kept[key]

    def _errors(
        self, found: _Results, expected: _Results, differentiate: bool, is_padded: bool
    ) -> dict[str, Any]:
        """Return the errors of results and gradients, as a `ModeResult` has them."""
        scales = scales_of(expected.documents)
        error, field = max(errors_between(found.documents, expected.documents, scales))
        gradient = (
            self._gradient_error(found, expected, scales, is_padded) if differentiate else None
        )
        return {"error": error, "field": field, "gradient": gradient}

    def _gradient_error(
        self, found: _Results, expected: _Results, scales: dict[str, float], is_padded: bool
    ) -> float | None:
        """Return the error of gradients; None where stock has none.

        Of padded batches none may be numbers: a token of padding may see nothing (softmax of
        nothing, float64)."""
        if (found.loss is None) != (expected.loss is None):
            return None
        one, other = (
            weighted_sum(each.documents, scales) if each.loss is None else each.loss
            for each in (found, expected)
        )
        given = trained(self.model)
        if not given or one is None or other is None:
            return None
        try:
            wanted = gradients_of(other, given)
        except Exception as error:
            # Some models have gradients in train mode alone.
            if self.model.training and not is_padded:
                why = f"not measured, because stock has none: {type(error).__name__}: {error}"
                self.report.notes["gradients"] = why
            return None
        if is_padded and not all(bool(each.isfinite().all()) for each in (other, *wanted)):
            return None
        return gradient_error(gradients_of(one, given), wanted)

    def _packed(self, name: str, differentiate: bool, replaces: bool) -> ModeResult:
        form, case = FORMS[name], self.case_of(name)
        call = case.call(form)
        unknown = [option for option in call.options if not case.takes(option)]
        if unknown or (form.asks_for_more and not case.outputs):
            raise NoReference(
                f"its forward takes no {', '.join(unknown) or 'argument that asks for more'}"
            )
        more = case.outputs if form.asks_for_more else {}
        # Where more is asked for, or documents begin elsewhere, than anybody has to.
        rare = form.asks_for_more or form.offset > 0
        alone: list[Fields] = []
        try:
            alone = self.alone(case, call, **more)
            return self._beside_alone(name, case, call, alone, differentiate, replaces)
        except Exception as failure:
            said, refused = (
                f"{type(failure).__name__}: {failure}",
                isinstance(failure, AutopackError),
            )
            # no mask, up to 4.57 (FNet)
            unexpected = re.search(r"unexpected keyword argument '(\w+)'", said)
            by_stock = not alone and (rare or form.own_documents)
            if (
                by_stock
                or (rare and refused)
                or (unexpected is not None and not case.takes(unexpected[1]))
            ):
                raise NoReference(said) from failure
            return ModeResult(name, self.model.training, failure=said)

    def _beside_alone(
        self,
        name: str,
        case: Case,
        call: Input,
        alone: list[Fields],
        differentiate: bool,
        replaces: bool,
    ) -> ModeResult:
        form, outputs = FORMS[name], Fields()
        loss, refused = None, None
        if self.labels is not None and form.labels:
            outputs, loss, refused = self._with_labels(
                call, self.labels, replaces and name == "default"
            )
        if (replaces and form.replaces) or not _tells_as_much(outputs, alone):
            # With labels, some models do not return all that they return without.
            given = case.given(call)
            outputs = fields_of(
                self.model(
                    **(in_used_tensors(self.model, given) if form.in_used_tensors else given)
                )
            )
        if form.padding:
            # One number of a row with padding may be of its padding too, as it is in stock's padded
            # batches.
            outputs = _with_axes(outputs)
        found, expected, unknown = call.sides.split(outputs, alone)
        if not any(expected):
            raise UnsupportedModel(
                "no field of its output can be compared with what documents get alone",
                code="nothing-to-audit",
            )
        if unknown:
            self._note_unknown(unknown, form)
        influence = (
            self._influence(case, call, alone, found, scales_of(expected)) if replaces else None
        )
        errors = self._errors(_Results(found), _Results(expected), differentiate, is_padded=False)
        told = {"influence": influence, "loss": loss, "loss_refused": refused, **errors}
        return ModeResult(name, self.model.training, **told)

    def _note_unknown(self, unknown: list[str], form: Form) -> None:
        """Note fields that nobody can divide.

        Raise for those that any call returns, unless the model is proven now.
        """
        said = ", ".join(sorted(unknown))
        self.report.notes["fields"] = f"not compared, of unknown form: {said}"
        if form.options or form.asks_for_more:
            return
        names = {re.split(r"[.\[]", field)[0] for field in unknown}
        # What is proven now may leave them out later.
        if "" in names or self.enabled is None or not self.enabled.is_settling:
            raise UnsupportedModel(
                f"nobody can tell which part of {said} in its output belongs to which document. "
                "Run the documents one per row",
                code="output-unknown",
            )
        self.report.unattributed.update(names)

    @torch.no_grad()
    def _influence(
        self,
        case: Case,
        call: Input,
        alone: list[Fields],
        found: list[Fields],
        scales: dict[str, float],
    ) -> np.ndarray:
        """Return `influence[i, j]`: the relative change of document i when j is replaced.

        NaN on the diagonal, and where a document is not replaced.
        """
        matrix, rows = np.full((len(found), len(found)), np.nan), len(call.sides.halves[0].owner)
        numbers = range(len(found)) if rows == 1 else range(1, len(found), len(found) // rows)
        for j in numbers:
            outputs = fields_of(self.model(**case.given(call, j)))
            # One number of the whole call changes with each document.
            changed, _, _ = call.sides.split(_with_axes(outputs), alone)
            before = [
                {name: each[name] for name in after}
                for each, after in zip(found, changed, strict=True)
            ]
            matrix[:, j] = [worst for worst, _ in errors_between(changed, before, scales)]
        np.fill_diagonal(matrix, np.nan)
        return matrix

    def _with_labels(
        self, call: Input, labels: Labels, in_every_way: bool
    ) -> tuple[Fields, float | None, str | None]:
        """Return the output with labels, its loss's relative error, and why it is refused.

        The error is the largest difference from the loss of the documents alone; of a loss that is
        asked for `in_every_way`, over all of them.
        """
        numbers = range(len(call.first))
        counts = [labels.counts[number % len(labels.counts)] for number in numbers]
        if not any(count > 0 for count in counts):
            return {}, None, None  # documents of one token predict nothing
        alone = [self._loss_alone(call, labels, number) for number in numbers]
        outputs, error = Fields(), 0.0
        try:
            for given, wanted, terms in self._ways(call, labels, alone, counts, in_every_way):
                found, loss = self._loss(call, given)
                # Documents may have their mean together, or their sum.
                error = max(
                    error,
                    min(relative_error(loss, each) for each in expected_losses(wanted, terms)),
                )
                outputs = outputs or found
        except AutopackError as refused:
            return {}, None, f"{type(refused).__name__}: {refused}"
        except Exception as failure:  # without labels the call may run
            return {}, math.inf, f"{type(failure).__name__}: {failure}"
        return outputs, error, None

    def _ways(
        self,
        call: Input,
        labels: Labels,
        alone: list[torch.Tensor],
        counts: list[int],
        all_of_them: bool,
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor], list[int]]]:
        """Yield labels as a loss is asked for, and the losses and terms of documents alone.

        One document may have labels alone: however a loss combines several, it must be the loss of
        that one. An encoder-decoder may make its decoder's tokens of labels. Trainers have summed
        losses divided by the terms of several calls; a run of stock tells if a loss heeds it.
        """
        yield labels.packed(call), alone, counts
        if not all_of_them:
            return
        if labels.per_token:
            for number in np.flatnonzero(np.array(counts) > 0).tolist():
                yield labels.packed(call, number), [alone[number]], [1]
        if self.case.is_pair:
            try:
                wanted = [
                    self._loss_alone(call, labels, number, **_MADE_OF_LABELS)
                    for number in range(len(alone))
                ]
            except Exception as error:
                why = f"not measured: {type(error).__name__}: {error}"
                self.report.notes["decoder's tokens made of labels"] = why
            else:
                yield labels.packed(call) | _MADE_OF_LABELS, wanted, counts
        if not self.case.takes(_ITEMS):
            return
        number, items = int(np.argmax(counts)), 2 * sum(counts) + 1
        way = {_ITEMS: items}
        why = "stock's loss of a document alone is no sum divided by it"
        try:
            told = self._loss_alone(call, labels, number, **way)
            shares = (1.0, 1.0), (counts[number] / items, sum(counts) / items)
            for of_one, of_all in shares:
                if relative_error(told, alone[number] * of_one) < 1e-3:
                    yield labels.packed(call) | way, [loss * of_all for loss in alone], counts
                    return
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # by any name, but something further in may not
            why = str(error)
        self.report.notes[_ITEMS] = f"not measured: {why}"

    def _loss(self, call: Input, labels: dict[str, Any]) -> tuple[Fields, torch.Tensor]:
        arguments = _without_none(self.case.given(call) | labels) | self.case.without_router
        output = self.model(**arguments)
        loss = loss_of(output)
        if loss is None:
            raise RuntimeError(
                "the model gives no loss for packed rows, although it gives one for documents alone"
            )
        return fields_of(output), loss

    def _loss_alone(self, call: Input, labels: Labels, number: int, **more: Any) -> torch.Tensor:
        _, loss = self._alone(self.case, call, number, labels, **more)
        if loss is None:
            raise RuntimeError(
                "stock gives no loss for a document alone, although it gives one for another"
            )
        return loss

    def _padded(self, name: str, differentiate: bool) -> ModeResult:
        """Run a padded batch, also as stock; raise `NoReference` if stock cannot."""
        enabled = self.enabled
        assert enabled is not None, "padded batches of stock are stock's"
        call, form = self.case.call(FORMS[name]), FORMS[name]
        before, measured = (
            enabled.tally.batches,
            ModeResult(name, self.model.training, kind="padded"),
        )
        try:
            output = self.model(**self.of_batch(call, form))
        except Exception as error:
            self._reference(self.of_batch(call, form), call.sides)  # stock may not run it either
            return replace(measured, failure=f"{type(error).__name__}: {error}")
        unpadded = enabled.tally.batches > before
        arguments = self.of_batch(call, form, drops=unpadded)
        wanted = self._reference(arguments, call.sides)
        fields, of_stock = fields_of(output), fields_of(wanted)
        for field, value in of_stock.items():
            shape = tuple(fields[field].shape) if field in fields else None
            if shape != tuple(value.shape):
                said = f"{field} has shape {shape}; stock gives {tuple(value.shape)}"
                return replace(measured, failure=said)
        found = _Results(_divided(fields, call.sides), loss_of(output))

        def beside(expected: _Results) -> ModeResult:
            loss = None
            if expected.loss is not None:
                loss = math.inf if found.loss is None else relative_error(found.loss, expected.loss)
            errors = self._errors(found, expected, differentiate, is_padded=True)
            return replace(measured, loss=loss, unpadded=unpadded, **errors)

        result = beside(_Results(_divided(of_stock, call.sides), loss_of(wanted)))
        if not self.report.is_exact(result) and self._reads_padding(enabled):
            # Where tokens get something of what stands in padding, documents alone tell, and not
            # stock's batch.
            labels = None if loss_of(wanted) is None else self.labels
            more = (
                _MADE_OF_LABELS
                if self.case.is_pair and "decoder_input_ids" not in arguments
                else {}
            )
            alone = self._padded_alone(call, of_stock, labels, more)
            other = alone and beside(alone)
            return other if other and self.report.is_exact(other) else result
        return result

    def _padded_alone(
        self, call: Input, fields: Fields, labels: Labels | None, more: dict[str, Any]
    ) -> _Results | None:
        """Return the documents' results alone, in the form of a padded batch's answer."""
        answers = [
            self._alone(self.case, call, number, labels, **more)
            for number in range(len(call.first))
        ]
        losses = [loss for _, loss in answers if loss is not None]
        if labels is not None and len(losses) < len(answers):
            return None
        with suppress(WrongShape):
            _, documents, _ = call.sides.split(_with_axes(fields), [each for each, _ in answers])
            return _Results(
                documents, None if labels is None else expected_losses(losses, labels.counts)[0]
            )
        return None

    def of_batch(
        self, call: Input, form: Form, filler: int | None = None, drops: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of a padded batch, made anew.

        If it `drops` them, without labels of tokens behind padding: autopack leaves these out, and
        stock compares them with what padding predicts."""
        arguments = self.case.given(call, filler=filler) | self.case.without_router
        if self.labels is not None and form.labels:
            arguments |= self.labels.padded(call.sides, drops)
            if drops and self.labels.shifts:
                self.report.notes["labels behind padding"] = (
                    "compared with stock without the terms in which it scores them by what it "
                    "predicts at padding"
                )
            if form.labels == "tokens" and self.labels.per_token:
                arguments = {
                    name: value
                    for name, value in arguments.items()
                    if not name.startswith("decoder_")
                }
        return arguments

    def _reads_padding(self, enabled: EnabledModel) -> bool:
        traits = enabled.traits
        reads = traits.recurs or traits.reads_padding or traits.counts_columns
        # By flash kernels upstream lets a decoder see the padding of its encoder.
        of_encoder = self.case.is_pair and "flash" in self.report.implementation
        return reads or of_encoder or enabled.anatomy.has_row_dependent_rotary

    def _reference(self, arguments: dict[str, Any], sides: Sides) -> Any:
        """Return stock's output for a padded batch; raise `NoReference` if it raises or gives no
        numbers."""
        try:
            output = run_as_stock(self.model, arguments)
        except Exception as error:
            raise NoReference(
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
        values = (
            value for document in _divided(fields_of(output), sides) for value in document.values()
        )
        if any(bool(value.isnan().any()) for value in values):
            raise NoReference("stock gives values that are no numbers")
        return output


def _without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _with_axes(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value.dim()}


def _divided(fields: Fields, sides: Sides) -> list[Fields]:
    """Return each document's part of every field; the whole of what its shape does not tell."""
    parts = {name: sides.parts(name, value) for name, value in fields.items()}
    return [{name: each[number] for name, each in parts.items()} for number in range(sides.count)]


def _tells_as_much(outputs: Fields, alone: list[Fields]) -> bool:
    """Return True if an output with labels has the fields of one without, in their form.

    Some models predict labelled tokens alone, (labelled, classes), if there are labels
    (ModernBERT's `sparse_prediction`).
    """
    if not outputs or not alone[0].keys() <= outputs.keys():
        return False
    return all(value.dim() == outputs[name].dim() for name, value in alone[0].items())

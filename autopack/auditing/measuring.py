"""Measure packed calls beside stock's documents alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from autopack.auditing.asking import Labels, expected_losses
from autopack.auditing.cases import FORMS, Case, Form, Input, NoReference
from autopack.auditing.compare import (
    Arguments,
    Fields,
    errors_between,
    first_beyond,
    gradient_error,
    relative_error,
    scales_of,
)
from autopack.auditing.fields import fields_of
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

_ITEMS = "num_items_in_batch"
MADE_OF_LABELS: Arguments = {"decoder_input_ids": None}
"""Arguments of an encoder-decoder that makes its decoder's tokens of labels."""


@dataclass
class Results:
    """Results of each document of a call, and the loss of all, attached to their graph."""

    documents: list[Fields]
    loss: Tensor | None = None


class Measuring:
    """Measurement of one model's packed calls; a run of stock is kept for all forms that use it."""

    def __init__(self, model: PreTrainedModel, case: Case, report: LeakReport):
        """Take a model and its documents; omissions are noted in the `report`."""
        self.model, self.case, self.report = model, case, report
        self.others: dict[str, Case] = {}
        """The documents of forms that have some of their own."""
        self.enabled = enabled_in(model)
        self.labels: Labels | None = None
        """Labels that the loss takes; None if none were found."""
        self._fields_stay = False
        """True if stock gives a document with labels all fields that it gives it without."""
        self._kept: dict[Any, tuple[Fields, Any]] = {}

    def case_of(self, name: str) -> Case:
        """Return the documents of a form: its own, or the usual ones."""
        return self.others.get(name, self.case)

    def alone(self, case: Case, call: Input, apart: bool = False, **more: Any) -> list[Fields]:
        """Return stock's fields for each document of a call alone, with `more` arguments.

        With `apart`, a document that stands in two rows has a graph for each: where upstream goes
        through float32, gradients of two uses round otherwise than the sum of each.
        """
        count = len(case.documents)
        labels = self.labels if self._fields_stay and case is self.case and not more else None
        return [
            self.one_alone(case, call, number, labels, use=apart and number >= count, **more)[0]
            for number in range(len(call.first))
        ]

    def one_alone(
        self,
        case: Case,
        call: Input,
        number: int,
        labels: Labels | None = None,
        use: int = 0,
        **more: Any,
    ) -> tuple[Fields, Any]:
        """Return stock's (fields, loss) of one document alone, with their graph, and keep them.

        `more` are arguments besides its own and labels, with which stock has to give a loss: raise
        `NoReference` if it gives none. Each `use` of the results has a graph of its own.
        """
        own = number % len(case.documents)
        key = own, call.first[number], id(case), self.model.training, labels is not None, use, *more
        if key not in self._kept:
            given = case.alone(call, number)
            if labels is not None:
                given |= labels.alone[own] | case.without_router
            output = run_as_stock(self.model, _without_none(given | more))
            self._kept[key] = fields_of(output), loss_of(output)
        if labels is not None and self._kept[key][1] is None:
            raise NoReference(
                "stock gives no loss for a document alone, although it gives one for another"
            )
        return self._kept[key]

    def errors(
        self, found: Results, expected: Results, differentiate: bool, is_padded: bool
    ) -> dict[str, Any]:
        """Return `ModeResult` fields for the errors of results and, if asked, of gradients."""
        scales = scales_of(expected.documents)
        error, field = max(errors_between(found.documents, expected.documents, scales))
        told: dict[str, Any] = {"error": error, "field": field}
        if error > self.report.tolerance and not is_padded:
            told["first"] = first_beyond(
                found.documents, expected.documents, field, self.report.tolerance
            )
        if differentiate:
            told["gradient"] = self._gradient_error(found, expected, scales, is_padded)
        return told

    def _gradient_error(
        self, found: Results, expected: Results, scales: dict[str, float], is_padded: bool
    ) -> float | None:
        """Return the largest error of a parameter's gradient; None if there are none to compare.

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

    def packed(self, name: str, differentiate: bool, replaces: bool) -> ModeResult:
        """Return the result of a form of packed call; raise `NoReference` if stock cannot run it.

        With `replaces`, documents are replaced one at a time, and the default form also runs all
        of `_loss_calls`.
        """
        form, case = FORMS[name], self.case_of(name)
        call = case.call(form)
        unknown = [option for option in call.options if not case.takes(option)]
        if unknown or (form.asks_for_more and not case.outputs):
            raise NoReference(
                f"its forward takes no {', '.join(unknown) or 'argument that asks for more'}"
            )
        # Where more is asked for, or documents begin elsewhere, than anybody has to.
        rare = form.asks_for_more or form.offset > 0
        alone: list[Fields] = []
        outputs, told = Fields(), dict[str, Any]()
        try:
            alone = self.alone(case, call, differentiate, **call.options)
            if self.labels is not None and form.labels:
                outputs, told["loss"], told["loss_refused"] = self._with_labels(
                    call, self.labels, replaces and name == "default"
                )
                if replaces and outputs:
                    labelled = self.one_alone(case, call, 0, self.labels)[0]
                    self._fields_stay = _has_all_fields(labelled, alone)
            if (replaces and form.replaces) or not _has_all_fields(outputs, alone):
                # With labels, some models do not return all that they return without.
                given = case.given(call)
                if form.in_used_tensors:
                    given = in_used_tensors(self.model, given)
                outputs = fields_of(self.model(**given))
            if form.padding:
                # One number of a row with padding may be of its padding too, as it is in stock's
                # padded batches.
                outputs = with_axes(outputs)
            found, expected, unknown = call.sides.split(outputs, alone)
            if not any(expected):
                raise UnsupportedModel(
                    "no field of its output can be compared with what documents get alone",
                    code="nothing-to-audit",
                )
            if unknown:
                self._note_unknown(unknown, form)
            if replaces:
                told["influence"] = self._influence(case, call, alone, found, scales_of(expected))
            told |= self.errors(Results(found), Results(expected), differentiate, is_padded=False)
        except Exception as failure:
            said = f"{type(failure).__name__}: {failure}"
            # no mask, up to 4.57 (FNet)
            unexpected = re.search(r"unexpected keyword argument '(\w+)'", said)
            if (
                (not alone and (rare or form.own_documents or form.options))
                or (rare and isinstance(failure, AutopackError))
                or (unexpected is not None and not case.takes(unexpected[1]))
            ):
                raise NoReference(said) from failure
            told = {"failure": said}
        return ModeResult(name, self.model.training, **told)

    def _note_unknown(self, unknown: list[str], form: Form) -> None:
        """Note fields that cannot be divided among documents; raise if every call has them.

        Raise `UnsupportedModel` for fields that any call returns, unless the model is being proven.
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
            changed, _, _ = call.sides.split(with_axes(outputs), alone)
            matrix[:, j] = [worst for worst, _ in errors_between(found, changed, scales)]
        np.fill_diagonal(matrix, np.nan)
        return matrix

    def _with_labels(
        self, call: Input, labels: Labels, in_every_way: bool
    ) -> tuple[Fields, float | None, str | None]:
        """Return (fields, relative error of the loss, message of a refusal) of a call with labels.

        The error is the largest difference from the loss of the documents alone, `in_every_way`
        over all of `_loss_calls`. The refusal is the message of an error of autopack.
        """
        numbers = range(len(call.first))
        counts = [labels.counts[number % len(labels.counts)] for number in numbers]
        if max(counts) <= 0:
            return {}, None, None  # documents of one token predict nothing
        alone = [self.one_alone(self.case, call, number, labels)[1] for number in numbers]
        outputs, error = Fields(), 0.0
        try:
            for given, wanted, terms in self._loss_calls(call, labels, alone, counts, in_every_way):
                arguments = _without_none(self.case.given(call) | given)
                output = self.model(**arguments | self.case.without_router)
                loss = loss_of(output)
                if loss is None:
                    raise RuntimeError(
                        "the model gives no loss for packed rows, although it gives one for "
                        "documents alone"
                    )
                # Documents may have their mean together, or their sum.
                error = max(
                    error,
                    min(relative_error(loss, each) for each in expected_losses(wanted, terms)),
                )
                outputs = outputs or fields_of(output)
        except AutopackError as refused:
            return {}, None, f"{type(refused).__name__}: {refused}"
        except Exception as failure:  # without labels the call may run
            return {}, math.inf, f"{type(failure).__name__}: {failure}"
        return outputs, error, None

    def _loss_calls(
        self,
        call: Input,
        labels: Labels,
        alone: list[Tensor],
        counts: list[int],
        all_of_them: bool,
    ) -> Iterator[tuple[Arguments, list[Tensor], list[int]]]:
        """Yield (arguments that ask for a loss, documents' losses alone, their counts of terms).

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
        notes = self.report.notes
        if self.case.is_pair:
            try:
                wanted = [
                    self.one_alone(self.case, call, number, labels, **MADE_OF_LABELS)[1]
                    for number in range(len(alone))
                ]
            except Exception as error:
                why = f"not measured: {type(error).__name__}: {error}"
                notes["decoder's tokens made of labels"] = why
            else:
                yield labels.packed(call) | MADE_OF_LABELS, wanted, counts
        if not self.case.takes(_ITEMS):
            return
        number, items = int(np.argmax(counts)), 2 * sum(counts) + 1
        way = {_ITEMS: items}
        why = "stock's loss of a document alone is no sum divided by it"
        try:
            _, told = self.one_alone(self.case, call, number, labels, **way)
        except (TypeError, ValueError, RuntimeError, NoReference) as error:
            why = str(error)  # by any name, but something further in may not
        else:
            for of_one, of_all in (1.0, 1.0), (counts[number] / items, sum(counts) / items):
                if relative_error(told, alone[number] * of_one) < 1e-3:
                    yield labels.packed(call) | way, [loss * of_all for loss in alone], counts
                    return
        notes[_ITEMS] = f"not measured: {why}"


def _without_none(arguments: Mapping[str, Any]) -> Arguments:
    """Return the arguments whose values are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def with_axes(fields: Fields) -> Fields:
    """Return the fields that have an axis: all but single numbers."""
    return {name: value for name, value in fields.items() if value.dim()}


def _has_all_fields(outputs: Fields, alone: list[Fields]) -> bool:
    """Return True if an output has every field of documents alone, with as many axes.

    Some models predict labelled tokens alone, (labelled, classes), if there are labels
    (ModernBERT's `sparse_prediction`).
    """
    if not outputs or not alone[0].keys() <= outputs.keys():
        return False
    return all(value.dim() == outputs[name].dim() for name, value in alone[0].items())

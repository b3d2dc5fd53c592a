"""Packed rows of a model in every form of call, compared with stock's documents alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autopack.auditing.cases import Case, Input, NoReference
from autopack.auditing.compare import Fields, errors_between, gradient_error, relative_error, scales_of
from autopack.auditing.fields import fields_of
from autopack.auditing.losses import Labels, expected_losses
from autopack.auditing.places import raised_at
from autopack.auditing.report import LeakReport, ModeResult
from autopack.auditing.running import Runner, weighted_sum
from autopack.calls.outputs import loss_of
from autopack.errors import AutopackError, UnsupportedModel

INFLUENCE = {"default", "two rows", "one beginning"}
"""Modes in which documents are replaced one at a time, and that also run without labels.

In the others, every document is compared with itself alone, and one call tells of results and loss.
Of several rows, one document of each is replaced.
"""
_ITEMS = "num_items_in_batch"


class PackedRuns:
    """Packed rows of one model. Stock runs once for all call modes that need it."""

    def __init__(self, runner: Runner, case: Case, others: Mapping[str, Case], report: LeakReport):
        """Take the model's `runner` and documents; `others` are modes' own documents, by mode.

        What is not measured is noted in the `report`.
        """
        self.runner, self.case, self.others, self.report = runner, case, others, report
        self._unknown: set[str] = set()
        """Fields whose parts cannot be assigned to documents."""
        self._outputs: dict[Any, Any] = {}
        self._losses: dict[Any, torch.Tensor] = {}

    @property
    def training(self) -> bool:
        """True while the model is in train mode."""
        return self.runner.model.training

    def alone(self) -> list[Fields]:
        """Return stock's results for every document by itself."""
        return self._alone(self.case, self.case.packed(), {})

    def measure(self, name: str, labels: Labels | None, differentiate: bool, replace: bool) -> ModeResult:
        """Run one call mode; raise `NoReference` if stock cannot run documents that begin there.

        With `replace` documents are replaced one at a time, and labels are given in every way.
        """
        case = self.others.get(name, self.case)
        call = case.packed(name)
        more = call.options if name == "every output" else {}
        unknown = [option for option in call.options if not case.takes(option)]
        if unknown or (name == "every output" and not more):
            raise NoReference(f"its forward takes no {', '.join(unknown) or 'argument that asks for more'}")
        # Where more is asked for, or documents begin elsewhere, than anybody has to.
        rare = bool(more) or any(first != case.base for first in call.first)
        own_documents = case is not self.case
        alone: list[Fields] = []
        try:
            alone = self._alone(case, call, more)
            given = None if more or own_documents else labels
            return self._measured(name, case, call, alone, given, differentiate, replace)
        except Exception as failure:
            said, refused = f"{type(failure).__name__}: {failure}", isinstance(failure, AutopackError)
            if not refused and (place := raised_at(failure)) is not None:
                said += f" ({place})"
            unexpected = re.search(r"unexpected keyword argument '(\w+)'", said)  # no mask, up to 4.57 (FNet)
            by_stock = not alone and (rare or own_documents)
            if by_stock or (rare and refused) or (unexpected is not None and not case.takes(unexpected[1])):
                raise NoReference(said) from failure
            return ModeResult(name, self.training, failure=said)

    def _measured(
        self,
        name: str,
        case: Case,
        call: Input,
        alone: list[Fields],
        labels: Labels | None,
        differentiate: bool,
        replace: bool,
    ) -> ModeResult:
        outputs: Fields = {}
        loss, refused = None, None
        if labels is not None:
            outputs, loss, refused = self._with_labels(call, labels, replace and name == "default")
        if (replace and name in INFLUENCE) or not _tells_as_much(outputs, alone):
            # With labels, some models do not return all that they return without.
            outputs = fields_of(self.runner.model(**case.given(call)))
        if (call.sides.halves[0].owner < 0).any():
            # One number of a row with padding may be of its padding too, as it is in stock's padded batches.
            outputs = {field: value for field, value in outputs.items() if value.dim()}
        found, expected, unknown = call.sides.split(outputs, alone)
        if not any(expected):
            raise UnsupportedModel(
                "no field of its output can be compared with what documents get alone", code="nothing-to-audit"
            )
        if unknown:
            self._note_unknown(unknown, is_asked_for=bool(call.options))
        scales = scales_of(expected)
        worst, field = max(errors_between(found, expected, scales))
        influence = self._influence(case, call, alone, found, scales) if replace else None
        gradient = self._gradient_error(found, expected, scales) if differentiate else None
        return ModeResult(name, self.training, worst, influence, gradient, loss, field=field, loss_refused=refused)

    def _note_unknown(self, unknown: list[str], is_asked_for: bool) -> None:
        """Note fields that nobody can divide; raise for those that any call returns, unless the model is proven now."""
        self._unknown |= set(unknown)
        self.report.notes["fields"] = f"not compared, of unknown form: {', '.join(sorted(self._unknown))}"
        if is_asked_for:
            return
        names = {re.split(r"[.\[]", field)[0] for field in unknown}
        # What is proven now may leave them out later.
        if "" in names or self.runner.enabled is None or not self.runner.enabled.is_settling:
            raise UnsupportedModel(
                f"nobody can tell which part of {', '.join(sorted(unknown))} in its output belongs to which "
                f"document. Run the documents one per row",
                code="output-unknown",
            )
        self.report.unattributed.update(names)

    def _alone(self, case: Case, call: Input, options: Mapping[str, Any]) -> list[Fields]:
        """Return stock's results for each document of a call, with their graph.

        A document that stands in two rows has a graph for each: where upstream goes through
        float32, gradients of two uses round otherwise than the sum of each.
        """
        found = []
        for number, first in enumerate(call.first):
            key = number, first, id(case), self.training, *options
            if key not in self._outputs:
                self._outputs[key] = fields_of(self.runner.stock({**case.alone(call, number), **options}))
            found.append(self._outputs[key])
        return found

    @torch.no_grad()
    def _influence(
        self, case: Case, call: Input, alone: list[Fields], found: list[Fields], scales: dict[str, float]
    ) -> np.ndarray:
        """Return `influence[i, j]`: the relative change of document i when j is replaced.

        NaN on the diagonal, and where a document is not replaced.
        """
        matrix, rows = np.full((len(found), len(found)), np.nan), len(call.sides.halves[0].owner)
        numbers = range(len(found)) if rows == 1 else range(1, len(found), len(found) // rows)
        for j in numbers:
            outputs = fields_of(self.runner.model(**case.given(call, j)))
            # One number of the whole call changes with each document.
            of_parts = {name: value for name, value in outputs.items() if value.dim()}
            changed, _, _ = call.sides.split(of_parts, alone)
            before = [{name: each[name] for name in after} for each, after in zip(found, changed, strict=True)]
            matrix[:, j] = [worst for worst, _ in errors_between(changed, before, scales)]
        np.fill_diagonal(matrix, np.nan)
        return matrix

    def _gradient_error(self, found: list[Fields], expected: list[Fields], scales: dict[str, float]) -> float | None:
        one, other = weighted_sum(found, scales), weighted_sum(expected, scales)
        if not self.runner.parameters() or one is None or other is None:
            return None
        try:
            wanted = self.runner.gradients(other)
        except Exception as error:
            if self.training:  # some models have gradients in train mode alone
                why = f"not measured, because stock has none: {type(error).__name__}: {error}"
                self.report.notes["gradients"] = why
            return None
        return gradient_error(self.runner.gradients(one), wanted)

    def _with_labels(self, call: Input, labels: Labels, in_every_way: bool) -> tuple[Fields, float | None, str | None]:
        """Return the output with labels, its loss's relative error, and why it is refused.

        The error is the largest difference from the loss of the documents alone; of a loss that is
        asked for `in_every_way`, over all of them.
        """
        numbers = range(len(call.first))
        counts = [labels.counts[number % len(labels.counts)] for number in numbers]
        if not any(count > 0 for count in counts):
            return {}, None, None  # documents of one token predict nothing
        packed = labels.packed(call)
        with torch.no_grad():
            alone = [self._loss_alone(call, labels, number) for number in numbers]
        try:
            outputs, loss = self._loss(self.case.given(call) | packed)
            error = _least_error(loss, alone, counts)
            if in_every_way:
                with torch.no_grad():
                    for more, wanted, terms in self._further_ways(call, labels, alone, counts):
                        _, loss = self._loss(self.case.given(call) | packed | more)  # made anew: some write to it
                        error = max(error, _least_error(loss, wanted, terms))
        except AutopackError as refused:
            return {}, None, f"{type(refused).__name__}: {refused}"
        except Exception as failure:  # without labels the call may run
            return {}, math.inf, f"{type(failure).__name__}: {failure}"
        return outputs, error, None

    def _further_ways(
        self, call: Input, labels: Labels, alone: list[torch.Tensor], counts: list[int]
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor], list[int]]]:
        """Yield arguments of other ways to ask for a loss, and the losses and terms of documents alone.

        One document may have labels alone: however a loss combines several, it must be the loss of
        that one. An encoder-decoder may make its decoder's tokens of labels. Trainers have summed
        losses divided by the terms of several calls; a run of stock tells if a loss heeds it.
        """
        way: dict[str, Any]
        if labels.per_token:
            for number in np.flatnonzero(np.array(counts) > 0).tolist():
                yield labels.packed(call, number), [alone[number]], [1]
        if self.case.is_pair:
            way = {"decoder_input_ids": None}
            try:
                wanted = [self._loss_alone(call, labels, number, **way) for number in range(len(alone))]
            except Exception as error:
                why = f"not measured: {type(error).__name__}: {error}"
                self.report.notes["decoder's tokens made of labels"] = why
            else:
                yield way, wanted, counts
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
                    yield way, [loss * of_all for loss in alone], counts
                    return
        except (TypeError, ValueError, RuntimeError) as error:  # by any name, but something further in may not
            why = str(error)
        self.report.notes[_ITEMS] = f"not measured: {why}"

    def _loss(self, given: dict[str, Any]) -> tuple[Fields, torch.Tensor]:
        arguments = _without_none(given) | self.case.without_router
        output = self.runner.model(**arguments)
        loss = loss_of(output)
        if loss is None:
            raise RuntimeError("the model gives no loss for packed rows, although it gives one for documents alone")
        return fields_of(output), loss

    def _loss_alone(self, call: Input, labels: Labels, number: int, **more: Any) -> torch.Tensor:
        """Return stock's loss of a document alone, with `more` arguments than its own and labels."""
        of_one = number % len(self.case.documents)
        key = of_one, call.first[number], self.training, *more
        if key not in self._losses:
            given = self.case.alone(call, number) | labels.alone[of_one] | self.case.without_router | more
            loss = loss_of(self.runner.stock(_without_none(given)))
            if loss is None:
                raise RuntimeError("stock gives no loss for a document alone, although it gives one for another")
            self._losses[key] = loss
        return self._losses[key]


def _without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _least_error(loss: torch.Tensor, alone: list[torch.Tensor], counts: list[int]) -> float:
    """Return the relative difference of a loss from the nearest one that documents may have together."""
    return min(relative_error(loss, expected) for expected in expected_losses(alone, counts))


def _tells_as_much(outputs: Fields, alone: list[Fields]) -> bool:
    """Return True if an output with labels has the fields of one without, in their form.

    Some models predict labelled tokens alone, (labelled, classes), if there are labels
    (ModernBERT's `sparse_prediction`).
    """
    if not outputs or not alone[0].keys() <= outputs.keys():
        return False
    return all(value.dim() == outputs[name].dim() for name, value in alone[0].items())

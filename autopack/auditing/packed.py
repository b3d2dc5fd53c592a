"""Packed rows of a model in every form of call, compared with stock's documents alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from autopack.auditing.asking import loss_of
from autopack.auditing.cases import MODES, Call, Case, NoReference
from autopack.auditing.fields import Fields, Sides, errors_between, fields_of, scales_of
from autopack.auditing.losses import Labels, expected_losses, find_labels, relative_error
from autopack.auditing.places import raised_at
from autopack.auditing.report import ModeResult
from autopack.auditing.running import Runner, weighted_sum
from autopack.errors import AutopackError, UnsupportedModel
from autopack.inspection.source import parameters_of

INFLUENCE = {"default", "two rows", "one beginning"}
"""Modes in which documents are replaced one at a time.

In the others, every document is compared with itself alone. Of several rows, one document of each
is replaced.
"""
WITHOUT_LABELS = {"default", "two rows"}
"""Modes that also run without labels; in the others one call tells of results and loss."""
GRADIENTS = {"default", "padding mask", "two rows"}
"""Modes whose gradients are compared, if they are asked for: in train mode if it is run."""
_ITEMS = "num_items_in_batch"


class PackedRuns:
    """One model in one training mode. Stock runs once for all call modes that need it."""

    def __init__(self, runner: Runner, case: Case, others: Mapping[str, Case]):
        """Take the model's `runner` and documents; `others` are modes' own documents, by mode."""
        self.runner, self.case, self.others = runner, case, others
        self.training = runner.model.training
        self.unknown: set[str] = set()
        """Fields whose parts cannot be assigned to documents."""
        self.unattributed: set[str] = set()
        """Those of them that calls return without being asked for more, by the names that the output has for them."""
        self.notes: dict[str, str] = {}
        """Other omissions from the measurements, with the reason."""
        self.asks_both: tuple[Labels, set[str]] | None = None
        """Labels for documents alone, and the fields that call for another run without."""
        self._outputs: dict[Any, Any] = {}
        self._losses: dict[Any, torch.Tensor] = {}
        self._gradients: dict[Any, Any] = {}

    def find_labels(self) -> tuple[Labels | None, str | None]:
        """Return labels that stock's loss takes, or why there are none; None without a loss."""
        runner, alone = self.runner, self.alone()
        with runner.as_stock():
            return find_labels(runner.model, self.case, alone, runner.stock, runner.enabled is None, runner.run)

    def alone(self) -> list[Fields]:
        """Return stock's results for every document by itself."""
        return [fields_of(output) for output in self._alone(self.case, MODES["default"](self.case))]

    def measure(
        self, name: str, labels: Labels | None, differentiate: bool, replace: bool, apart: bool = True
    ) -> ModeResult:
        """Run one call mode; raise `NoReference` if stock cannot run documents that begin there.

        With `replace` documents are replaced one at a time, with `apart` labels are given in every
        way.
        """
        case = self.others.get(name, self.case)
        call = MODES[name](case)
        options = call.options if name == "every output" else {}
        unknown = [option for option in call.options if not case.takes(option)]
        if unknown or (name == "every output" and not options):
            raise NoReference(f"its forward takes no {', '.join(unknown) or 'argument that asks for more'}")
        unusual = bool(options) or case is not self.case or any(first != case.base for first in call.first)
        try:
            alone = [fields_of(output) for output in self._alone(case, call, options, apart=differentiate)]
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if unusual:
                raise NoReference(said) from error
            return ModeResult(name, self.training, failure=said)
        try:
            given = None if options or case is not self.case else labels
            return self._measured(name, case, call, alone, given, differentiate, replace, apart)
        except Exception as failure:
            said = f"{type(failure).__name__}: {failure}"
            if not isinstance(failure, AutopackError) and (place := raised_at(failure)) is not None:
                said += f" ({place})"
            # Where more is asked for, or documents begin elsewhere, than anybody has to.
            rare = options or any(first != case.base for first in call.first)
            refused = rare and isinstance(failure, AutopackError)
            if refused or self._is_not_taken(said, case, call):  # no mask, up to 4.57 (FNet)
                raise NoReference(said) from failure
            return ModeResult(name, self.training, failure=said)

    def _is_not_taken(self, said: str, case: Case, call: Call) -> bool:
        """Return True if a call failed for an argument that stock does not take alone either."""
        found = re.search(r"unexpected keyword argument '(\w+)'", said)
        given = {**call.arguments, **call.options}
        if found is None or found[1] not in given:
            return False
        value = given[found[1]]
        if isinstance(value, torch.Tensor):
            value = torch.ones_like(case.by_itself(0)["input_ids"])
        try:
            self.runner.stock({**case.by_itself(0), found[1]: value})
        except TypeError as error:
            return found[0] in str(error)
        except Exception:  # it takes it, whatever it says of its value
            return False
        return False

    def _measured(
        self,
        name: str,
        case: Case,
        call: Call,
        alone: list[Fields],
        labels: Labels | None,
        differentiate: bool,
        replace: bool,
        apart: bool,
    ) -> ModeResult:
        outputs: Fields = {}
        loss, refused = None, None
        if labels is not None:
            outputs, loss, refused = self._with_labels(name, call, labels, apart)
        if (apart and name in WITHOUT_LABELS) or not self._tells_as_much(outputs, alone):
            # With labels, some models do not return all that they return without.
            outputs = fields_of(self.runner.run(**case.given(call)))
        sides = Sides.of(call)
        if sum(sides.lengths) < math.prod(sides.shape):
            # One number of a row with padding may be of its padding too, as it is in stock's padded batches.
            outputs = {field: value for field, value in outputs.items() if value.dim()}
        found, expected, unknown = sides.split(outputs, alone)
        if not any(expected):
            raise UnsupportedModel(
                "no field of its output can be compared with what documents get alone", code="nothing-to-audit"
            )
        self.unknown |= set(unknown)
        if unknown and not call.options:
            names = {re.split(r"[.\[]", field)[0] for field in unknown}
            # What is proven now may leave them out later.
            if "" in names or self.runner.enabled is None or not self.runner.enabled.is_settling:
                raise UnsupportedModel(
                    f"nobody can tell which part of {', '.join(sorted(unknown))} in its output belongs to which "
                    f"document. Run the documents one per row",
                    code="output-unknown",
                )
            self.unattributed |= names
        scales = scales_of(expected)
        worst, field = max(errors_between(found, expected, scales))
        influence = None
        if replace:
            one_by_one = labels if loss is not None and apart and name == "default" else None
            influence, of_one, refused_one = self._influence(case, call, alone, found, scales, one_by_one)
            loss = None if refused_one or loss is None else max(loss, of_one)
            refused = refused or refused_one
        gradient = self._gradient_error(call, found, expected, scales) if differentiate else None
        return ModeResult(name, self.training, worst, influence, gradient, loss, field=field, loss_refused=refused)

    @staticmethod
    def _tells_as_much(outputs: Fields, alone: list[Fields]) -> bool:
        """Return True if an output with labels has the fields of one without, in their form.

        Some models predict labelled tokens alone, (labelled, classes), if there are labels
        (ModernBERT's `sparse_prediction`).
        """
        if not outputs or not alone[0].keys() <= outputs.keys():
            return False
        return all(value.dim() == outputs[name].dim() for name, value in alone[0].items())

    def _alone(self, case: Case, call: Call, options: dict[str, Any] | None = None, apart: bool = False) -> list[Any]:
        """Return stock's outputs for each document of a call, by default, with their graph.

        With `apart` a document that stands in two rows has a graph for each: where upstream goes
        through float32, gradients of two uses round otherwise than the sum of each.
        """
        kept, number_of = options or {}, len(call.first) if apart else len(case.documents)
        keys = [(id(case), number % number_of, first, bool(kept)) for number, first in enumerate(call.first)]
        for key in keys:
            if key not in self._outputs:
                together = self._alone_with_labels(call, key[1]) if case is self.case and not kept else None
                plain = {**case.alone(call, key[1]), **kept}
                self._outputs[key] = self.runner.stock(plain) if together is None else together
        return [self._outputs[key] for key in keys]

    def forget(self) -> None:
        """Drop stock's results for documents alone, and their graphs."""
        self._outputs.clear()
        self._gradients.clear()

    def _alone_with_labels(self, call: Call, number: int) -> Any:
        """Return a document's output with labels, if that one call does for both; keep its loss."""
        if self.asks_both is None:
            return None
        labels, wanted = self.asks_both
        output = self.runner.stock(self._labelled(call, labels, number))
        loss = loss_of(output)
        if loss is None or not wanted <= fields_of(output).keys():
            return None
        self._losses[number % len(self.case.documents), call.first[number]] = loss.detach()
        return output

    def _labelled(self, call: Call, labels: Labels, number: int) -> dict[str, Any]:
        """Return all arguments of a call with one document of another call, and its labels."""
        of_one = labels.alone[number % len(labels.alone)]
        return {**self.case.alone(call, number), **of_one, **self.case.without_router}

    @torch.no_grad()
    def _influence(
        self,
        case: Case,
        call: Call,
        alone: list[Fields],
        found: list[Fields],
        scales: dict[str, float],
        labels: Labels | None,
    ) -> tuple[np.ndarray, float, str | None]:
        """Return `influence[i, j]`: the relative change of document i when j is replaced.

        NaN on the diagonal, and where a document is not replaced. With labels of one per token,
        only the document behind j has labels meanwhile: however a loss combines several, it must be
        the loss of that document alone. The largest relative difference from it comes second, and
        the reason why such labels are refused third.
        """
        matrix, worst_loss, refused = np.full((len(found), len(found)), np.nan), 0.0, None
        rows = call.shape[0]
        numbers = range(len(found)) if rows == 1 else range(1, len(found), len(found) // rows)
        for j in numbers:
            outputs: Fields = {}
            behind = (j + 1) % len(found)
            if labels is not None and labels.per_token and labels.counts[behind] > 0:
                try:
                    outputs, loss = self._loss(call, labels.packed(call, behind), j)
                    worst_loss = max(worst_loss, relative_error(loss, self._loss_alone(call, labels, behind)))
                except AutopackError as error:
                    refused = f"{type(error).__name__}: {error}"
                except Exception:  # without labels the call may run
                    worst_loss = math.inf
            if not self._tells_as_much(outputs, alone):
                outputs = fields_of(self.runner.run(**case.given(call, j)))
            # One number of the whole call changes with each document.
            of_parts = {name: value for name, value in outputs.items() if value.dim()}
            changed, _, _ = Sides.of(call).split(of_parts, alone)
            before = [{name: each[name] for name in after} for each, after in zip(found, changed, strict=True)]
            matrix[:, j] = [worst for worst, _ in errors_between(changed, before, scales)]
        np.fill_diagonal(matrix, np.nan)
        return matrix, worst_loss, refused

    def _gradient_error(
        self, call: Call, found: list[Fields], expected: list[Fields], scales: dict[str, float]
    ) -> float | None:
        one, other = weighted_sum(found, scales), weighted_sum(expected, scales)
        if not self.runner.parameters() or one is None or other is None:
            return None
        key = tuple(call.first), tuple(call.spans), tuple(expected[0])
        if key not in self._gradients:
            try:
                self._gradients[key] = self.runner.gradients(other)
            except Exception as error:
                if self.training:  # some models have gradients in train mode alone
                    self.notes["gradients"] = f"not measured, because stock has none: {type(error).__name__}: {error}"
                return None
        gradient = self.runner.gradients(one)
        if not gradient.is_like(self._gradients[key]):
            self._gradients[key] = self.runner.gradients(other)
        return gradient.error(self._gradients[key])

    def _with_labels(
        self, name: str, call: Call, labels: Labels, apart: bool
    ) -> tuple[Fields, float | None, str | None]:
        """Return the output with labels, its loss's relative error, and why it is refused.

        The error is the difference from the loss of the documents alone.
        """
        counts = [labels.counts[number % len(labels.counts)] for number in range(len(call.spans))]
        if not any(count > 0 for count in counts):
            return {}, None, None  # documents of one token predict nothing
        with torch.no_grad():
            alone = [self._loss_alone(call, labels, number) for number in range(len(call.spans))]
        try:
            outputs, together = self._loss(call, labels.packed(call))
            expected = min(expected_losses(alone, counts), key=lambda each: relative_error(together, each))
            error = relative_error(together, expected)
            apart = apart and name == "default"
            if apart and call.source is not None:
                error = max(error, self._error_without_tokens(call, labels, counts) or 0.0)
            if apart:
                error = max(error, self._error_of_items(call, labels, alone, counts, expected))
        except AutopackError as refused:
            return {}, None, f"{type(refused).__name__}: {refused}"
        except Exception as failure:  # without labels the call may run
            return {}, math.inf, f"{type(failure).__name__}: {failure}"
        return outputs, error, None

    @torch.no_grad()
    def _error_without_tokens(self, call: Call, labels: Labels, counts: list[int]) -> float | None:
        """Return that error for an encoder-decoder that makes its decoder's tokens of labels.

        None if stock does not.
        """

        def without(arguments: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in arguments.items() if name != "decoder_input_ids"}

        numbers = range(len(call.spans))
        try:
            alone = [loss_of(self.runner.stock(without(self.case.by_itself(n)) | labels.alone[n])) for n in numbers]
            losses = [loss for loss in alone if loss is not None]
            if len(losses) < len(alone):
                raise ValueError("stock gives no loss")
        except Exception as error:
            self.notes["decoder's tokens made of labels"] = f"not measured: {type(error).__name__}: {error}"
            return None
        found = loss_of(self.runner.run(**without(self.case.given(call)), **labels.packed(call)))
        if found is None:
            return math.inf
        return min(relative_error(found, each) for each in expected_losses(losses, counts))

    @torch.no_grad()
    def _error_of_items(
        self, call: Call, labels: Labels, alone: list[torch.Tensor], counts: list[int], expected: torch.Tensor
    ) -> float:
        """Return that error for calls that divide summed losses, as trainers do; 0 if none can.

        A run of stock on a document alone tells if the loss heeds it.
        """
        named = parameters_of(type(self.runner.model))
        if not named.takes_others and _ITEMS not in named.names:
            return 0.0
        number, items = int(np.argmax(counts)), 2 * sum(counts) + 1
        try:
            told = loss_of(self.runner.stock({**self._labelled(call, labels, number), _ITEMS: items}))
        except (TypeError, ValueError) as error:  # what its forward takes by any name, something further in may not
            self.notes[_ITEMS] = f"not measured: {error}"
            return 0.0
        shares = {1.0: alone[number], sum(counts) / items: alone[number] * counts[number] / items}
        share = next((s for s, loss in shares.items() if told is not None and relative_error(told, loss) < 1e-3), None)
        if share is None:
            self.notes[_ITEMS] = "not measured: stock's loss of a document alone is no sum divided by it"
            return 0.0
        packed = {**self.case.given(call), **labels.packed(call), **self.case.without_router}
        found = loss_of(self.runner.run(**packed, num_items_in_batch=items))
        return math.inf if found is None else relative_error(found, expected * share)

    def _loss(
        self, call: Call, labels: dict[str, torch.Tensor], replaced: int | None = None
    ) -> tuple[Fields, torch.Tensor]:
        output = self.runner.run(**self.case.given(call, replaced), **labels, **self.case.without_router)
        loss = loss_of(output)
        if loss is None:
            raise RuntimeError("the model gives no loss for packed rows, although it gives one for documents alone")
        return fields_of(output), loss

    def _loss_alone(self, call: Call, labels: Labels, number: int) -> torch.Tensor:
        key = number % len(self.case.documents), call.first[number]
        if key not in self._losses:
            loss = loss_of(self.runner.stock(self._labelled(call, labels, number)))
            if loss is None:
                raise RuntimeError("stock gives no loss for a document alone, although it gives one for another")
            self._losses[key] = loss
        return self._losses[key]

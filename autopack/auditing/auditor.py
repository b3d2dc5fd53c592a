"""The leak auditor: checks that a model gives every document stock's results in every call.

The only reference for packed rows is the stock model's result for a document alone, in its default
call. Padded batches of an enabled model are compared with stock on the same batches. *Packed
against alone*: every field of the output. *Influence*: replace the tokens of one document and watch
the others. *Gradients*: of all parameters. *Loss*: the model's own loss of the documents' labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from autopack.auditing.asking import check_can_be_audited
from autopack.auditing.cases import ALIKE, FORMS, LONGER, ROUTER, Case, NoReference, threshold_lengths
from autopack.auditing.compare import bounds_of
from autopack.auditing.left_as_found import left_as_found
from autopack.auditing.losses import Labels, find_labels
from autopack.auditing.measuring import Measuring
from autopack.auditing.places import first_that_moves, place_of
from autopack.auditing.report import LeakReport, ModeResult
from autopack.auditing.routers import measure_routers
from autopack.auditing.running import (
    Runner,
    can_have_others,
    close_by,
    dtype_of,
    in_double,
    other_weights,
)
from autopack.calls.prefixes import why_not
from autopack.integrations.wrappers import unwrap
from autopack.layout import LEAST_SHARED


def audit(
    model: Any,
    *,
    lengths: tuple[int, ...] = (7, 12, 5, 9),
    modes: tuple[str, ...] | None = None,
    training: tuple[bool, ...] = (False, True),
    gradients: bool = True,
    seed: int = 0,
) -> LeakReport:
    """Measure whether documents that share a row see each other, on this very model, where it is.

    Args:
        model: A transformers model (or one wrapped by PEFT, DDP, accelerate, `torch.compile`), enabled or not. Weights,
            gradients, training mode and random state are left as they were.
        lengths: Lengths in tokens of the random documents of a row; two or more.
        modes: Names among those of `autopack.auditing.cases.FORMS`; by default all that the model has: padded batches
            where it is enabled, the router's loss where it has one, longer documents where its configuration holds
            thresholds.
        training: Modes to run among eval (False) and train (True). Dropout and router noise are off
            in both. Of all modes, those that differ the most are run in both; named modes in each.
        gradients: True to compare all trainable parameters' gradients; costs 4 times their memory.
        seed: Seed of the documents.

    Returns:
        A report with `.exact`, `.worst` (relative to the standard deviation of a field alone), the
        reasons why `.packed`, `.labels` and `.padded` calls are not exact, a table per call mode,
        the influence of each document on each other, as text, HTML and picture.
    """
    base = unwrap(model)
    unknown = set(modes or ()) - set(FORMS)
    if unknown:
        raise ValueError(f"modes must be among {', '.join(FORMS)}; found {', '.join(sorted(unknown))}")
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths must name two or more documents of at least one token; found {lengths}")
    if not training:
        raise ValueError(f"training must name False, True or both; found {training}")
    check_can_be_audited(base)
    with left_as_found(base) as enabled:
        if enabled is not None:
            enabled.live = None  # what is watched is the user's training
        return Audit(base, lengths, modes, seed).run(training, gradients)


_BEGINNING = LEAST_SHARED + 2
"""Number of common tokens of documents with one beginning: rows are worth taking together."""


class Audit:
    """One audit of one model: the modes that it runs, and their results."""

    def __init__(
        self,
        model: PreTrainedModel,
        lengths: tuple[int, ...],
        modes: tuple[str, ...] | None = None,
        seed: int = 0,
        doubts: bool = True,
        alike: bool = False,
    ):
        """Draw documents of these `lengths`, or, if they are to begin `alike`, longer by what they have in common."""
        self.model, self.lengths, self.seed, self.doubts, self.alike = model, lengths, seed, doubts, alike
        self.runner = Runner(model)
        self.case = _begun_alike(model, lengths, seed) if alike else Case(model, lengths, seed)
        self.others: dict[str, Case] = {}
        """The documents of modes that have some of their own."""
        longer = threshold_lengths(model, lengths)
        if longer is not None:
            self.others[LONGER] = Case(model, longer, seed)
        enabled = self.runner.enabled
        if enabled is not None and not self.case.is_pair and why_not(enabled) is None:
            self.others[ALIKE] = _begun_alike(model, lengths, seed)
        pads = enabled is not None and enabled.options.unpad
        there = {
            name: name in self.others if form.own_documents else pads or not form.is_padded
            for name, form in FORMS.items()
        } | {ROUTER: self.case.has_router}
        self.all = modes is None
        self.modes = tuple(name for name in modes or FORMS if there[name])
        dtype = dtype_of(model)
        bounds = bounds_of(dtype)
        self.report = LeakReport(
            model=f"{type(model).__name__} ({model.config.model_type})",
            implementation=str(getattr(model.config, "_attn_implementation", None) or "eager"),
            enabled=enabled is not None,
            dtype=str(dtype).removeprefix("torch."),
            lengths=lengths,
            tolerance=bounds.results,
            gradient_tolerance=bounds.gradients,
            loss_tolerance=bounds.losses,
            results=[],
            left_out={name: "it has none" for name in modes or () if not there[name]},
        )
        self.measuring = Measuring(self.runner, self.case, self.others, self.report)

    def run(self, training: tuple[bool, ...] = (False, True), gradients: bool = True) -> LeakReport:
        """Run all modes and fill in the report."""
        with torch.set_grad_enabled(self._find_reference()):
            self.measuring.labels = self._labels(training)
            results = list(self._measured(training, gradients and torch.is_grad_enabled()))
        self.report.results.extend(result for name in self.modes for result in results if result.mode == name)
        if self.doubts and self.report.dtype == "float32":
            self._measure_again(gradients)
        worst = None if self.runner.enabled is None else self.report.worst_packed
        if worst is not None and worst.failure is None and worst.mode in FORMS:
            self.model.train(worst.training)
            case = self.others.get(worst.mode, self.case)
            call = case.call(FORMS[worst.mode])
            runs = [partial(self.model, **case.given(call, replaced)) for replaced in (None, 0)]
            name = first_that_moves(self.model, runs, call.sides, np.arange(call.sides.count) == 0)
            if name:
                self.report.notes["place"] = f"it begins in {place_of(self.model.get_submodule(name))}"
        return self.report

    def _measure_again(self, gradients: bool) -> None:
        """Replace errors of float32 that double precision removes: rounding decided a choice.

        The documents are the same. Code without double precision gets weights that lie close by.
        """
        for change, said in ((in_double, "in float64"), (close_by, "with weights a thousandth apart")):
            wrong = [r for r in self.report.results if self._may_be_rounding(r)]
            if not wrong or not can_have_others(self.model):
                return
            modes = tuple(dict.fromkeys(result.mode for result in wrong))
            training = tuple(sorted({result.training for result in wrong}))
            with other_weights(self.model, change):
                again = Audit(self.model, self.lengths, modes, self.seed, False, self.alike).run(training, gradients)
            measured = {(r.mode, r.training): r for r in again.results if r.failure is None}
            for place, result in enumerate(self.report.results):
                other = measured.get((result.mode, result.training)) if self._may_be_rounding(result) else None
                if other is not None and other.says_as_much_as(result) and self.report.is_exact(other):
                    self.report.results[place] = other
                    self.report.notes[result.name] = f"measured {said}, since rounding decided a choice or a kink"

    def _may_be_rounding(self, result: ModeResult) -> bool:
        measured = result.failure is None and result.loss_refused is None
        return measured and result.mode in FORMS and not self.report.is_exact(result)

    def _find_reference(self) -> bool:
        """Choose the run of a document alone: its tokens only or, if that raises, no cache.

        Return True if it has gradients where wanted: some attention has no backward on a device.
        """
        cases = [self.case, *self.others.values()]
        enabled, notes = self.runner.enabled, self.report.notes
        if enabled is not None and enabled.traits.masks_without_cache:
            for case in cases:
                case.options = case.options_of_packed = {"use_cache": False}
            notes["documents alone"] = "run with use_cache=False, as with labels: else they see later tokens"
        first = self._raised_alone()
        if first is None:
            return True
        for options in ({"use_cache": False}, {}):
            for case in cases:
                case.options = options
            with torch.set_grad_enabled(bool(options)):
                raised = self._raised_alone()
            if raised is None and options:
                notes["documents alone"] = f"run with use_cache=False, because stock raises without: {first}"
                return True
        if raised is None:  # else it does not run at all, which every mode will say
            notes["gradients"] = f"not measured, because stock has none: {first}"
        return raised is not None

    def _raised_alone(self) -> str | None:
        try:
            self.runner.stock(self.case.by_itself(0))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _labels(self, training: tuple[bool, ...]) -> Labels | None:
        """Return labels that the loss takes in a training mode, found before any measurement."""
        why: str | None = None
        for train in training:
            self.model.train(train)
            try:
                alone = self.measuring.alone(self.case, self.case.call(FORMS["default"]))
                labels, said = find_labels(self.runner, self.case, alone, ignore_boundaries=not self.report.enabled)
            except Exception as error:  # documents alone cannot be run: every mode will say so
                labels, said = None, f"{type(error).__name__}: {error}"
            if labels is not None:
                return labels
            why = why or said
        if why is not None:
            self.report.notes["loss"] = f"not measured, because {why}"
        return None

    def _measured(self, training: tuple[bool, ...], gradients: bool) -> Iterator[ModeResult]:
        """Yield the result of every mode that is run, in eval and in train."""
        trained, replacing = (self._first_of(part) for part in ("trains", "replaces"))
        for train in training:
            is_last, is_first = train or True not in training, not train or False not in training
            for name in self.modes:
                if self.all and not is_first and not FORMS[name].trains:
                    continue
                self.model.train(train)
                try:
                    if name == ROUTER:
                        yield measure_routers(self.measuring)
                        continue
                    differentiate = gradients and is_last and name in trained
                    yield self.measuring.measure(name, differentiate, is_first and name in replacing)
                except NoReference as reason:
                    self.report.left_out[name] = str(reason)

    def _first_of(self, part: str) -> set[str]:
        """Return the modes whose form has a part in an audit, or all of them if none has."""
        return {name for name in self.modes if getattr(FORMS[name], part)} or set(self.modes)


def _begun_alike(model: PreTrainedModel, lengths: tuple[int, ...], seed: int) -> Case:
    return Case(model, tuple(2 * _BEGINNING + n for n in lengths), seed, _BEGINNING)

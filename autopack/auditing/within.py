"""An audit of a model of any size within a budget: the most important first, then all it allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from autopack.auditing.asking import check_can_be_audited
from autopack.auditing.auditor import Audit
from autopack.auditing.budget import Budget, Meter, OverBudget
from autopack.auditing.cases import MODES
from autopack.auditing.left_as_found import left_as_found
from autopack.auditing.losses import Labels
from autopack.auditing.padded import ROUTER
from autopack.auditing.report import LeakReport, ModeResult

ESSENTIAL = (("default", False), ("default", True), ("right-padded", True))
"""The essential runs, as mode and True for training; without them nothing is said.

They are packed rows against documents alone in both, with labels and one document replaced in
evaluation and gradients in training, and one padded batch with its gradients.
"""
FURTHER = (
    "two rows",
    "thresholds",
    ROUTER,
    "left-padded",
    "right-padded, no labels",
    "segment ids",
    "padding mask",
    "mid-document start",
    "use_cache=False",
    "all-ones mask",
    "left-padded, use_cache=False",
    "right-padded, use_cache=False",
    "every output",
)
"""Modes beyond these, run in evaluation, in this order."""
_IN_TRAINING = 7
"""Forwards of the essential runs in training."""


@dataclass
class Found:
    """The result of an audit within a budget: the report, and its omissions with the reason."""

    report: LeakReport
    left_out: dict[str, str] = field(default_factory=dict)
    forwards: int = 0


def audit_within(model: PreTrainedModel, budget: Budget, lengths: tuple[int, ...]) -> Found:
    """Audit a model as `audit` does, within a budget; raise `OverBudget` if essentials are missing.

    Gradients are compared by projections, one parameter at a time, so that they need no memory of
    the size of weights; gradients of parameters that are distributed over processes are held, as
    `audit` does.
    """
    check_can_be_audited(model)
    meter = Meter(budget, model)
    with left_as_found(model):
        short = _Short(model, lengths, meter)
        report = short.run((False, True), gradients=True)
    return Found(report, short.not_done(), meter.forwards)


class _Short(Audit):
    """An audit in the order of importance, until its meter ends it."""

    def __init__(self, model: PreTrainedModel, lengths: tuple[int, ...], meter: Meter):
        super().__init__(model, lengths, meter=meter)
        self.meter = meter
        self._not_run: dict[str, str] = {}
        self._wrong = False
        """True if an essential run was not exact."""

    def labels(self, training: tuple[bool, ...]) -> Labels | None:
        """Return labels as `Audit` finds them; None if that leaves too little for essentials."""
        self.meter.halve()
        try:
            return super().labels(training)
        except OverBudget as error:
            self.report.notes["loss"] = f"not measured, because {error} before such were found"
            return None
        finally:
            self.meter.restore()

    def measured(self, training: tuple[bool, ...], differentiate: bool, labels: Labels | None) -> Iterator[ModeResult]:
        if labels is not None:
            known = {name for fields in self.packed_runs(False).alone() for name in fields}
            self.packed_runs(True).asks_both = labels, known
        # Training may change buffers and weights, so all of evaluation comes before it.
        for train in (False, True):
            for name in (name for name, when in ESSENTIAL if when == train and name in self.modes):
                result = self._essential(name, train, labels, differentiate and train)
                if result is not None:
                    yield result
            if not train:
                yield from self._further(labels)

    def _essential(self, name: str, train: bool, labels: Labels | None, differentiate: bool) -> ModeResult | None:
        try:
            result = self._one(name, train, labels, differentiate, essential=True)
        except OverBudget as error:
            if not self._wrong:
                raise
            self._not_run[f"{name}, {'train' if train else 'eval'}"] = str(error)
            return None
        self._wrong = self._wrong or (result is not None and not self.report.is_exact(result))
        return result

    def _further(self, labels: Labels | None) -> Iterator[ModeResult]:
        self.meter.halve(_IN_TRAINING)
        spent: str | None = None
        for name in (name for name in FURTHER if name in self.modes):
            tokens = sum(self.others[name].lengths) if name in self.others else 0
            why = spent if self.meter.fits(tokens) else f"{tokens} tokens need more than the memory"
            if why is None:
                try:
                    if (result := self._one(name, False, labels, False, essential=False)) is not None:
                        yield result
                except OverBudget as error:
                    why = spent = str(error)
            if why is not None:
                self._not_run[name] = why
        self.meter.restore()

    def _one(
        self, name: str, train: bool, labels: Labels | None, differentiate: bool, essential: bool
    ) -> ModeResult | None:
        apart = essential and name in MODES and not train
        with torch.set_grad_enabled(differentiate):
            result = self.result(name, train, labels, differentiate, apart or name == "two rows", apart)
        if train:
            self.packed_runs(train).forget()  # graphs of documents alone, beside those of padded batches
        return result

    def raised_alone(self) -> str | None:
        try:
            self.packed_runs(False).alone()  # which keeps what it finds
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def change_by_cache(self, train: bool) -> float:
        try:
            return super().change_by_cache(train)
        except OverBudget:  # what is wrong is said without it
            return 0.0

    def not_done(self) -> dict[str, str]:
        """Return the runs that the budget left out, with the reason."""
        left = dict(self._not_run)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        numbered = self.runner.parameters()
        if self.runner.left_out:
            shown = [names[id(numbered[number])] for number in sorted(self.runner.left_out)]
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            left[f"gradients of {', '.join(shown[:3])}{more}"] = "they need more than the memory"
        return left


def words_of(left_out: dict[str, str]) -> str:
    """Return the omissions, in a clause, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(map(repr, names))}, since {reason}" for reason, names in by_reason.items())

"""The auditor's report, as text, HTML and picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from autopack.auditing.cases import ALIKE, ROUTER
from autopack.auditing.compare import BOUNDS
from autopack.pages.figure import Influence, Report, Sections, Table, on_axes, picture

__all__ = ["LeakReport", "TrainerReport"]

_SIDES = "<<>>>><"
"""Alignment of the table's columns: < for texts, > for numbers."""


@dataclass(frozen=True)
class ModeResult:
    """Measurements of one call mode, in train or eval: relative errors, None where not measured.

    `error` is the largest difference of a result packed and alone, relative to the standard
    deviation of its field alone, and `field` the name of that field. `influence` (documents,
    documents) is the same for document i when document j is replaced. `gradient` is the largest
    difference of a parameter's gradient relative to that parameter's largest. `loss` is the
    relative difference of the loss. Of padded batches (`kind`), they are differences from stock on
    the same batch, and `unpadded` is True if the batch ran without its padding. `failure` holds the
    message if the call raised, `loss_refused` if it raised with labels (its loss is infinite unless
    the error is one of autopack). `first` is the first token beyond the tolerance, in words.
    """

    mode: str
    training: bool
    error: float | None = math.nan
    influence: np.ndarray | None = None
    gradient: float | None = None
    loss: float | None = None
    failure: str | None = None
    kind: str = "packed"
    field: str = ""
    unpadded: bool | None = None
    loss_refused: str | None = None
    first: str = ""

    @property
    def name(self) -> str:
        """Name of the mode, followed by train or eval."""
        return f"{self.mode}, {'train' if self.training else 'eval'}"

    @property
    def worst_influence(self) -> float:
        """Largest influence of one document on another; NaN if not measured."""
        return math.nan if self.influence is None else _largest(self.influence)

    @property
    def errors(self) -> tuple[float | None, ...]:
        """Errors of results, influence, gradients and loss, in this order; None if not measured."""
        return (
            self.error,
            None if self.influence is None else self.worst_influence,
            self.gradient,
            self.loss,
        )

    @property
    def worst(self) -> float:
        """Largest error of results or influence; infinite if one is NaN or the call raised."""
        measured = [error for error in self.errors[:2] if error is not None]
        if self.failure is not None or any(map(math.isnan, measured)):
            return math.inf
        return max(measured, default=0.0)


@dataclass(frozen=True, repr=False)
class LeakReport(Report):
    """The result of an audit; `exact` is True if all is within rounding; print it for a table."""

    model: str
    implementation: str
    enabled: bool
    dtype: str
    lengths: tuple[int, ...]
    tolerance: float
    gradient_tolerance: float
    loss_tolerance: float
    results: list[ModeResult]
    left_out: dict[str, str] = dataclass_field(default_factory=dict)
    """Call modes that have no reference, with the reason, such as documents that stock cannot run
    so."""
    notes: dict[str, str] = dataclass_field(default_factory=dict)
    """Other omissions from the measurements, with the reason."""
    unattributed: set[str] = dataclass_field(default_factory=set)
    """Fields of the output whose parts cannot be assigned to documents, where a model is proven."""

    @property
    def exact(self) -> bool:
        """True if something ran and all agrees with stock, within the rounding of the dtype."""
        return bool(self.results) and all(self.is_exact(result) for result in self.results)

    @property
    def measured(self) -> set[Any]:
        """Set of (mode, how padding ran, index in `errors`) of all errors that were measured."""
        return {
            (r.name, r.unpadded, place)
            for r in self.results
            for place, e in enumerate(r.errors)
            if e is not None
        }

    def is_exact(self, result: ModeResult) -> bool:
        """Return True if all errors of one call mode are within rounding."""
        return self._is_exact_without_loss(result) and (result.loss or 0.0) <= self.loss_tolerance

    def _is_exact_without_loss(self, result: ModeResult) -> bool:
        """Return True if all errors of one call mode but its loss's are within rounding."""
        # Softmax and norms mostly go through float32 in any dtype, and round otherwise beside
        # padding. A token that is computed once for documents that begin alike gets the sum of
        # gradients before it is rounded.
        rounds_otherwise = result.kind == "padded" or result.mode == ALIKE
        least, gradient = BOUNDS[torch.float32], result.gradient or 0.0
        of_gradients = max(self.gradient_tolerance, least.gradients if rounds_otherwise else 0.0)
        of_results = max(self.tolerance, least.results if result.kind == "padded" else 0.0)
        return gradient <= of_gradients and result.worst <= of_results

    @property
    def packed(self) -> str | None:
        """The reason why packed calls without labels are not exact; None if they are."""
        worst = self.worst_packed
        if worst is None:
            return None
        said = self._words(worst)
        return f"{said} ({self.notes['place']})" if "place" in self.notes else said

    @property
    def worst_packed(self) -> ModeResult | None:
        """The worst of the inexact packed calls, whatever their loss is; None if all are exact."""
        wrong = [r for r in self._of_kind("packed") if not self._is_exact_without_loss(r)]
        return max(wrong, key=lambda r: r.worst, default=None)

    @property
    def labels(self) -> str | None:
        """Reason why packed calls with labels are not known to be exact; None if they are.

        None also for a model without a loss.
        """
        packed = self._of_kind("packed")
        wrong = [r for r in packed if not (r.loss or 0.0) <= self.loss_tolerance]
        if wrong:
            worst = max(wrong, key=lambda r: r.loss or 0.0)
            return f"in mode '{worst.name}' the loss is off by {_number(worst.loss)}"
        refused = next((r for r in packed if r.loss_refused and r.mode != ROUTER), None)
        if refused is not None:
            return f"in mode '{refused.name}' the call with labels raised {refused.loss_refused}"
        if "loss" in self.notes:
            return f"no labels were found that its loss takes: {self.notes['loss']}"
        return None

    @property
    def padded(self) -> str | None:
        """The reason why padded batches differ from stock's; None if none does, or none ran."""
        wrong = [r for r in self._of_kind("padded") if not self.is_exact(r)]
        return self._words(max(wrong, key=lambda r: r.worst)) if wrong else None

    @property
    def runs_without_padding(self) -> bool:
        """True if some padded batch ran without its padding, and all have stock's results."""
        return self.padded is None and any(result.unpadded for result in self._of_kind("padded"))

    def _of_kind(self, kind: str) -> list[ModeResult]:
        """Return the results of a kind, packed or padded."""
        return [result for result in self.results if result.kind == kind]

    @property
    def worst(self) -> float:
        """Largest forward error of packed modes, else of all; infinite if one raised, NaN if none.

        A report on a trainer has none.
        """
        return max((r.worst for r in self._of_kind("packed") or self.results), default=math.nan)

    @property
    def worst_gradient(self) -> float:
        """Largest relative gradient error of all call modes; 0 if gradients were not measured."""
        return max((r.gradient for r in self.results if r.gradient is not None), default=0.0)

    @property
    def worst_result(self) -> ModeResult:
        """Result with the largest forward error, inexact ones before exact ones."""
        return max(self.results, key=lambda r: (not self.is_exact(r), r.worst))

    @property
    def worst_case(self) -> str:
        """Sentence on the worst call mode and its errors; raise if none ran."""
        return self._words(self.worst_result)

    def _words(self, worst: ModeResult) -> str:
        """Return a sentence on a call mode: its failure, or its errors."""
        if worst.failure is not None:
            return f"in mode '{worst.name}' the call raised {worst.failure}"
        what = worst.field if worst.field not in ("", "output") else "logits"
        verb = "are" if what.endswith("s") else "is"
        said = f"{what} {verb} off by {_number(worst.error)} of their standard deviation"
        if worst.influence is not None:
            said += f", and one document changes another by {worst.worst_influence:.1e}"
        if worst.worst <= self.tolerance and not self.is_exact(worst):
            said = (
                f"gradients are off by {_number(worst.gradient)} and the loss by "
                f"{_number(worst.loss)}"
            )
        return f"in mode '{worst.name}' {said}"

    @property
    def influence(self) -> np.ndarray:
        """Influence [i, j] of document j on i in the worst mode (with all pairs if any), or NaN."""
        ran = [(r.worst, r.influence) for r in self.results if r.influence is not None]
        whole = [each for each in ran if np.isnan(each[1]).sum() <= len(each[1])]
        nothing = 0.0, np.full((1, 1), np.nan)
        return max(whole or ran, key=itemgetter(0), default=nothing)[1]

    def _headline(self) -> str:
        """Return a line with the model, its state and dtype, and the verdict."""
        state = "enabled by autopack" if self.enabled else "stock, not enabled"
        leaks = self.results and self.worst_result.worst < math.inf
        wrong = "LEAKS" if leaks else "NOT EXACT"
        return (
            f"{self.model}, {state}, {self.implementation}, {self.dtype}: "
            f"{'exact' if self.exact else wrong}"
        )

    def _table(self) -> list[list[str]]:
        """Return the rows of the table of call modes, as texts, headings included."""
        rows = [["call mode", "", "vs alone", "influence", "gradients", "loss", ""]]
        of_padded = ["padded batch", "", "vs stock", *[""] * 4]
        for r in self.results:
            is_padded = r.kind == "padded"
            if is_padded and of_padded not in rows:
                rows.append(of_padded)
            wrong = "raised" if r.failure else "WRONG" if is_padded else "LEAK"
            verdict = "exact" if self.is_exact(r) else wrong
            if is_padded and not r.failure:
                verdict += ", without padding" if r.unpadded else ", left as it came"
            numbers = map(_number, r.errors)
            rows.append([r.mode, "train" if r.training else "eval", *numbers, verdict])
        return rows

    def _not_measured(self) -> list[str]:
        """Return a line for each mode that was left out or raised, and for each note."""
        said = [f"not run: {mode}: {reason}" for mode, reason in sorted(self.left_out.items())]
        said += [f"{what}: {reason}" for what, reason in sorted(self.notes.items())]
        raised = {f"raised: {r.failure}" for r in self.results if r.failure}
        raised |= {f"raised with labels: {r.loss_refused}" for r in self.results if r.loss_refused}
        return said + sorted(raised)

    def _sections(self) -> Sections:
        """Return the pieces of the report that text and HTML consist of."""
        documents = ", ".join(map(str, self.lengths))
        scale = (
            f"Documents of {documents} tokens. Errors are relative to the standard deviation of "
            f"what documents get alone; within rounding means at most {self.tolerance:.0e} "
            f"(gradients {self.gradient_tolerance:.0e}, loss {self.loss_tolerance:.0e})."
        )
        table = Table(self._table(), _SIDES)
        return Sections([self._headline()], [table], [self._chart], [scale, *self._not_measured()])

    def plot(self, ax: Any = None) -> Any:
        """Draw the influence in the worst call mode as a heat map; return matplotlib's figure.

        Needs matplotlib (`pip install "autopack[plot]"`). Draws on `ax` if one is given.
        """
        return picture([self._chart]) if ax is None else on_axes(self._chart, ax)

    @property
    def _chart(self) -> Influence:
        """Heat map of the influence in the worst call mode."""
        state, largest = "enabled" if self.enabled else "stock", _number(_largest(self.influence))
        return Influence(
            f"{self.model}\n{state}: largest influence {largest}",
            self.influence,
            self.tolerance,
        )


class Measured(NamedTuple):
    """Row of a trainer's audit: `wrong` is None if it was not measured, `says` holds reasons."""

    measure: str
    part: str
    found: str
    wrong: bool | None
    says: list[str]


@dataclass(frozen=True, repr=False)
class TrainerReport(LeakReport):
    """Result of the audit of a trainer; print it for a table of its `rows`."""

    rows: list[Measured] = dataclass_field(default_factory=list)

    @property
    def exact(self) -> bool:
        """True if everything was measured, and nothing is wrong."""
        return bool(self.rows) and all(row.wrong is False for row in self.rows)

    def _sections(self) -> Sections:
        """Return the pieces of the report that text and HTML consist of."""
        verdicts = {True: "WRONG", False: "exact", None: "NOT MEASURED"}
        table = [["measure", "of", "found", ""]]
        table += [[row.measure, row.part, row.found, verdicts[row.wrong]] for row in self.rows]
        said = [f"{row.measure}, {row.part}: {text}" for row in self.rows for text in row.says]
        headline = f"{self.model}, {self.dtype}: {'exact' if self.exact else 'NOT EXACT'}"
        return Sections([headline], [Table(table, "<<<<")], [], said)


def _largest(influence: np.ndarray) -> float:
    """Return the largest influence, NaN left out; NaN if all are."""
    return float(np.fmax.reduce(influence, axis=None))


def _number(value: float | None) -> str:
    """Return a number in short for a table, "-" if it is not measured."""
    if value is None or math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}"

"""What the auditor found, as text, HTML and picture."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LeakReport", "ModeResult"]


@dataclass(frozen=True)
class ModeResult:
    """Measurements of one call mode, in train or eval; errors are relative, None stands for not measured.

    `error` is the largest difference of a logit packed and alone, relative to the standard deviation of the logits
    alone; `influence` (documents, documents) the same for document i when document j is replaced; `gradient` the
    largest difference of a parameter's gradient relative to that parameter's largest; `loss` the relative difference of
    the loss. `failure` holds the message where the call raised.
    """

    mode: str
    training: bool
    error: float = math.nan
    influence: np.ndarray = field(default_factory=lambda: np.full((1, 1), np.nan))
    gradient: float | None = None
    loss: float | None = None
    failure: str | None = None

    @property
    def name(self) -> str:
        """Mode and train or eval."""
        return f"{self.mode}, {'train' if self.training else 'eval'}"

    @property
    def worst_influence(self) -> float:
        """Largest influence of one document on another."""
        return float(np.nanmax(self.influence)) if not np.isnan(self.influence).all() else math.nan

    @property
    def worst(self) -> float:
        """Largest of the forward errors: packed against alone, and influence; infinite where one is no number."""
        worst = max(self.error, self.worst_influence)
        return math.inf if self.failure is not None or math.isnan(self.error + self.worst_influence) else worst


@dataclass(frozen=True)
class LeakReport:
    """The result of an audit. `exact` says whether all is within rounding; printing it shows the table."""

    model: str
    implementation: str
    enabled: bool
    dtype: str
    lengths: tuple[int, ...]
    tolerance: float
    gradient_tolerance: float
    loss_tolerance: float
    results: list[ModeResult]
    left_out: dict[str, str] = field(default_factory=dict)
    """Call modes in which the model cannot run a document alone, with the reason."""

    @property
    def exact(self) -> bool:
        """Whether every call mode gave every document what it gets alone, within the rounding of the dtype."""
        return bool(self.results) and all(self.is_exact(result) for result in self.results)

    def is_exact(self, result: ModeResult) -> bool:
        """Whether one call mode is within rounding, forward and backward."""
        if result.failure is not None or not result.worst <= self.tolerance:
            return False
        gradient, loss = result.gradient or 0.0, result.loss or 0.0
        return gradient <= self.gradient_tolerance and loss <= self.loss_tolerance

    @property
    def worst(self) -> float:
        """Largest relative forward error over all call modes; infinite where a call raised."""
        return max(result.worst for result in self.results)

    @property
    def worst_gradient(self) -> float:
        """Largest relative gradient error over all call modes; 0 where gradients were not measured."""
        return max((r.gradient for r in self.results if r.gradient is not None), default=0.0)

    @property
    def worst_result(self) -> ModeResult:
        """The call mode that is worst."""
        return max(self.results, key=lambda r: (not self.is_exact(r), r.worst))

    @property
    def worst_case(self) -> str:
        """The worst call mode in words."""
        worst = self.worst_result
        if worst.failure is not None:
            return f"in mode '{worst.name}' the call raised {worst.failure}"
        if worst.worst <= self.tolerance and not self.is_exact(worst):
            return (
                f"in mode '{worst.name}' gradients are off by {_number(worst.gradient)} and the loss by "
                f"{_number(worst.loss)}"
            )
        return (
            f"in mode '{worst.name}' logits are off by {worst.error:.1e} of their standard deviation, and one document "
            f"changes another by {worst.worst_influence:.1e}"
        )

    @property
    def influence(self) -> np.ndarray:
        """Influence of document j on document i (documents, documents) in the worst call mode that ran."""
        ran = [r for r in self.results if r.failure is None]
        return max(ran, key=lambda r: r.worst).influence if ran else np.full((1, 1), np.nan)

    def _headline(self) -> str:
        state = "enabled by autopack" if self.enabled else "stock, not enabled"
        verdict = "exact" if self.exact else "LEAKS" if math.isfinite(self.worst) else "NOT EXACT"
        return f"{self.model}, {state}, {self.implementation}, {self.dtype}: {verdict}"

    def _table(self) -> list[list[str]]:
        rows = [["call mode", "", "packed vs alone", "influence", "gradients", "loss", ""]]
        for r in self.results:
            verdict = "exact" if self.is_exact(r) else "raised" if r.failure is not None else "LEAK"
            numbers = [_number(x) for x in (r.error, r.worst_influence, r.gradient, r.loss)]
            rows.append([r.mode, "train" if r.training else "eval", *numbers, verdict])
        return rows

    def __str__(self) -> str:
        table = self._table()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 or i == len(row) - 1 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        documents = ", ".join(map(str, self.lengths))
        notes = [
            f"Documents of {documents} tokens. Errors are relative to the standard deviation of the logits alone;",
            f"within rounding means at most {self.tolerance:.0e} (gradients {self.gradient_tolerance:.0e}, "
            f"loss {self.loss_tolerance:.0e}).",
        ]
        failures = sorted({r.failure for r in self.results if r.failure is not None})
        notes += [
            f"not run: {mode}: the model cannot run such a document alone ({why})"
            for mode, why in sorted(self.left_out.items())
        ]
        return "\n".join([self._headline(), "", *lines, "", *notes, *(f"raised: {f}" for f in failures)])

    __repr__ = __str__

    def to_html(self) -> str:
        """The table and the influence matrix as an HTML fragment without scripts or outside references."""
        head, *body = self._table()
        cells = "".join(f"<th style='text-align:left;padding-right:1em'>{html.escape(c)}</th>" for c in head)
        rows = "".join(
            "<tr>" + "".join(f"<td style='padding-right:1em'>{html.escape(c)}</td>" for c in row) + "</tr>"
            for row in body
        )
        failures = sorted({r.failure for r in self.results if r.failure is not None})
        raised = "".join(f"<p>raised: {html.escape(f)}</p>" for f in failures)
        raised += "".join(
            f"<p>not run: {html.escape(f'{mode}: {why}')}</p>" for mode, why in sorted(self.left_out.items())
        )
        return (
            f"<div><p><b>{html.escape(self._headline())}</b></p><table><tr>{cells}</tr>{rows}</table>"
            f"<p>Influence of one document (column) on another (row), worst call mode:</p>{self._matrix_html()}"
            f"{raised}</div>"
        )

    def _matrix_html(self) -> str:
        rows = []
        for i, row in enumerate(self.influence):
            cells = []
            for value in row:
                shade = 0.0 if not value > self.tolerance else min(1.0, 0.3 + 0.7 * min(value, 1.0))
                style = f"background:rgba(200,60,40,{shade:.2f});padding:0.3em 0.6em;text-align:right"
                cells.append(f"<td style='{style}'>{'' if np.isnan(value) else _number(float(value))}</td>")
            rows.append(f"<tr><th>{i + 1}</th>{''.join(cells)}</tr>")
        head = "".join(f"<th>{j + 1}</th>" for j in range(self.influence.shape[1]))
        return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"

    _repr_html_ = to_html

    def plot(self, ax: Any = None) -> Figure:
        """Draw the influence of each document on each other, in the worst call mode, as a heat map.

        Needs matplotlib (`pip install "autopack[plot]"`). Draws on `ax` where one is given; returns the figure.
        """
        try:
            from matplotlib.colors import LogNorm
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('LeakReport.plot needs matplotlib: pip install "autopack[plot]"') from error
        if ax is None:
            ax = Figure(figsize=(5.6, 4.6), layout="constrained").subplots()
        matrix = np.clip(self.influence, 1e-8, 10.0)
        image = ax.imshow(matrix, norm=LogNorm(1e-8, 10.0), cmap="magma_r")
        ax.set_facecolor("#dddddd")
        numbers = np.arange(1, len(matrix) + 1)
        ax.set_xticks(numbers - 1, numbers)
        ax.set_yticks(numbers - 1, numbers)
        ax.set_xlabel("document that was changed")
        ax.set_ylabel("document that was watched")
        largest = math.nan if np.isnan(self.influence).all() else float(np.nanmax(self.influence))
        ax.set_title(f"{self.model}\n{'enabled' if self.enabled else 'stock'}: largest influence {_number(largest)}")
        for (i, j), value in np.ndenumerate(self.influence):
            if not np.isnan(value):
                colour = "white" if value > 1e-3 else "black"
                text = "0" if value == 0 else f"{value:.0e}"
                ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
        bar = ax.figure.colorbar(image, ax=ax, shrink=0.85)
        bar.set_label("change of logits / their standard deviation")
        bar.ax.axhline(self.tolerance, color="black", linewidth=1)
        return ax.figure


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}"

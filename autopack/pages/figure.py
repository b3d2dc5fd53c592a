"""The one module that draws: charts are data, and matplotlib is imported here alone.

A chart has a caption and a height in inches, and draws itself on axes. Several make one picture, of
a file or of a page: there it is SVG, with texts that are texts. A report has sections, from which
text, a page and a picture are made.
"""

from __future__ import annotations

import math
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from autopack.errors import AutopackError
from autopack.pages import parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, LINE, PAPER = "#22303c", "#dde2e7", "#ffffff"
PADDED, GROUPED, PACKED = "#b8bec7", "#8fc1cf", "#1f6f8b"
STYLE = Path(__file__).with_name("figures.mplstyle")
"""Settings of figures; texts are never taken for formulas."""
_NO_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML forbids and fonts lack: terminals' codes in messages, bytes of a path that
are no text."""
MOST = 10.0
"""Influence from which on colours are the darkest."""
WIDTH = 6
"""Width of every chart, in inches."""


class NeedsMatplotlib(AutopackError, ImportError):
    """Error for a picture that was asked for where matplotlib is not installed."""

    code = "missing-package"


@dataclass(frozen=True)
class Bar:
    """A row of `Bars`: a name, a value, the text at its end, and an interval or None."""

    name: str
    value: float
    said: str
    color: str = PACKED
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bars:
    """Chart with a horizontal bar for each row, and a text at its end."""

    caption: str
    rows: Sequence[Bar]

    @property
    def height(self) -> float:
        """Height of the figure, in inches."""
        return 0.7 + 0.34 * max(len(self.rows), 3)

    def draw(self, axes: Axes) -> None:
        places, values = range(len(self.rows)), np.array([row.value for row in self.rows])
        form: dict[str, Any] = {"color": [row.color for row in self.rows]}
        if any(row.interval for row in self.rows):
            ends = [
                row.interval or (value, value) for row, value in zip(self.rows, values, strict=True)
            ]
            form |= {"xerr": abs(np.transpose(ends) - values), "ecolor": INK}
        bars = axes.barh(places, values, 0.66, **form)
        axes.bar_label(bars, [row.said for row in self.rows], padding=6)
        axes.set_yticks(places, [row.name for row in self.rows])
        axes.invert_yaxis()
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.grid(axis="x")


@dataclass(frozen=True)
class Histogram:
    """Histogram of the lengths of documents in tokens, with a dashed line at the mean."""

    caption: str
    lengths: Any
    height: float = 3.0

    def draw(self, axes: Axes) -> None:
        most = np.max(self.lengths)
        axes.hist(
            self.lengths, bins=60, range=(0, most), color=PACKED, edgecolor=PAPER, linewidth=0.4
        )
        axes.axvline(np.mean(self.lengths), color=INK, lw=1, ls="--")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlim=(0, most), xlabel="tokens", ylabel="documents")


@dataclass(frozen=True)
class Influence:
    """Heat map of the changes in each document (row) that come from each other one (column).

    `values` are (documents, documents), nan on the diagonal. Values up to `rounding` have the
    lightest colour.
    """

    caption: str
    values: Any
    rounding: float
    height: float = 4.6

    def draw(self, axes: Axes) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm

        least, count = min(self.rounding, 1.0), len(self.values)
        # A logarithm of 0 would be as grey as what was not measured.
        drawn = np.maximum(self.values, 1e-3 * least)
        colors = colormaps["Reds"].with_extremes(under="#e3eff3", bad=LINE)
        edges = np.arange(count + 1) + 0.5
        axes.pcolormesh(edges, edges, drawn, norm=LogNorm(least, MOST), cmap=colors)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        for (row, column), value in np.ndenumerate(self.values):
            said = "" if np.isnan(value) else f"{value:.2g}"
            axes.text(
                column + 1,
                row + 1,
                said,
                ha="center",
                va="center",
                color=PAPER if value > 0.1 else INK,
            )
        numbers = range(1, count + 1)
        below = "document that was changed\n(change of logits / their standard deviation)"
        axes.set(xticks=numbers, yticks=numbers, xlabel=below, ylabel="document that was watched")


Chart: TypeAlias = Bars | Histogram | Influence


def on_axes(chart: Chart, axes: Axes) -> Any:
    """Draw a chart on the user's axes, and return the figure that these are in."""
    with _matplotlib().style.context(STYLE):
        chart.draw(axes)
        axes.set_title(chart.caption)
    return axes.figure


def picture(charts: Sequence[Chart], title: str = "") -> Figure:
    """Return a matplotlib figure of charts in rows of three, below a title.

    Raises `NeedsMatplotlib` where it is not installed.
    """
    columns = min(len(charts), 3)
    rows, title = (
        math.ceil(len(charts) / columns),
        _filled(title.splitlines(), 10 * WIDTH * columns),
    )
    height = rows * (0.3 + max(chart.height for chart in charts)) + 0.25 * len(title.splitlines())
    library = _matplotlib()
    with library.style.context(STYLE):
        figure: Figure = library.figure.Figure(figsize=(WIDTH * columns, height))
        figure.suptitle(title, x=0.01, ha="left")
        for number, chart in enumerate(charts, 1):
            axes = figure.add_subplot(rows, columns, number)
            chart.draw(axes)
            axes.set_title(_filled(chart.caption.splitlines(), 8 * WIDTH))
        for text in figure.findobj(library.text.Text):
            text.set_text(_NO_CHARACTERS.sub("\ufffd", text.get_text()))
        return figure


def figures(charts: Sequence[Chart]) -> str:
    """Return charts as HTML with one SVG figure, or as a line of text without matplotlib.

    The figure refers to nothing outside of it.
    """
    buffer, nothing = StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    try:
        drawn = picture(charts)
    except NeedsMatplotlib:
        return parts.lines(["Figures are left out, since matplotlib is not installed."])
    # Several figures share a page: what one names must not be another's.
    with _matplotlib().style.context([STYLE, {"svg.hashsalt": repr(charts)}]):
        drawn.savefig(buffer, format="svg", metadata=nothing)
    svg = buffer.getvalue()
    head, end, body = svg[svg.index("<svg") :].partition(">")
    head = re.sub(r' (xmlns|xmlns:xlink|width|height)="[^"]*"', "", head)
    body = body.replace("xlink:href", "href").replace("<g id=", "<g class=")
    return parts.figure(f'{head} role="img"{end}{body}', 40 * min(len(charts), 3))


class Table(NamedTuple):
    """Table of a report: its rows, the head first, and a side per column as in `parts.table`."""

    rows: Sequence[parts.Row]
    sides: str
    caption: str = ""

    @classmethod
    def of(cls, head: str, form: str, *columns: Iterable[Any], **options: str) -> Table:
        """Return a table of a head and a row for each entry of the columns, written by a format.

        A | parts the cells of head and format. `options` are the table's other fields.
        """
        lines = [head, *map(form.format, *columns)]
        return cls([line.split("|") for line in lines], **options)


class Sections(NamedTuple):
    """Parts of a report: lines at its head, tables, charts, and notes."""

    head: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Chart]
    notes: Sequence[str]


class Report(ABC):
    """Base of results that are shown as text, HTML and a picture, all made of their sections."""

    @abstractmethod
    def _sections(self) -> Sections:
        """Return the sections that text, HTML and picture of the report are made of."""

    def __str__(self) -> str:
        head, tables, _, notes = self._sections()
        shown = (
            "\n".join([*filter(None, [each.caption]), *parts.text_table(*each[:2])])
            for each in tables
        )
        return "\n\n".join([_filled(head, 100), *shown, _filled(notes, 100, "  ")])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, tables, charts, notes = self._sections()
        return parts.report(head, tables, figures(charts) if charts else "", notes)

    def plot(self) -> Figure:
        """Return a matplotlib figure of the report's charts, below its head.

        Raises `AutopackError` where matplotlib is missing (`pip install "autopack[plot]"`).
        """
        head, _, charts, _ = self._sections()
        return picture(charts, "\n".join(head))


def formats() -> list[str]:
    """Return the endings of picture files that matplotlib writes. Raises `NeedsMatplotlib`."""
    return sorted(_matplotlib().figure.Figure().canvas.get_supported_filetypes())


def _matplotlib() -> Any:
    """Return matplotlib; raise `NeedsMatplotlib` where it is not installed."""
    try:
        import matplotlib.figure
        import matplotlib.style
    except ImportError as error:
        raise NeedsMatplotlib(
            f"pictures need matplotlib, which could not be imported ({error}); install it "
            "with: pip install 'autopack[plot]'"
        ) from error
    return matplotlib


def _filled(lines: Iterable[str], width: int, hang: str = "") -> str:
    """Return lines wrapped to a width, as one text; `hang` indents continued lines."""
    form: dict[str, Any] = {
        "subsequent_indent": hang,
        "break_on_hyphens": False,
        "break_long_words": False,
    }
    return "\n".join(textwrap.fill(line, width, **form) for line in lines)

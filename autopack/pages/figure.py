"""The one module that draws: charts are data, and matplotlib is imported here alone.

A chart has a caption and a height in inches, and draws itself on axes. Several make one picture, or figures of a page:
SVG of its width, with texts that are texts. A report is a finding in pieces, of which text, a page and a picture are
made.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from autopack.errors import AutopackError
from autopack.pages import parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LINE, PAPER = "#22303c", "#5b6773", "#dde2e7", "#ffffff"
PADDED, GROUPED, PACKED, STOCK, LEAKS = "#b8bec7", "#8fc1cf", "#1f6f8b", "#d3c4a3", "#d9822b"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "svg.fonttype": "none",
}
"""Settings of figures; texts are never taken for formulas."""
_NO_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML has no place for, and fonts no glyph: terminals' codes in messages, bytes of a path that are no text."""
NO_FIGURES = "Figures are left out, since matplotlib is not installed (pip install 'autopack[plot]')."
MOST = 10.0
"""Influence from which on colours are the darkest."""
WIDTH = 6
"""Width of every chart, in inches."""


class NeedsMatplotlib(AutopackError, ImportError):
    """A picture was asked for, and matplotlib is not installed."""

    code = "missing-package"


@dataclass(frozen=True)
class Bar:
    """A row of `Bars`: a value and the interval it lies in, or, in its place, the reason why there is none."""

    name: str
    value: float | None
    said: str
    color: str = PACKED
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bars:
    """A horizontal bar for each row, with what is said of it at its end."""

    caption: str
    rows: Sequence[Bar]

    @property
    def height(self) -> float:
        return 0.7 + 0.34 * max(len(self.rows), 3)

    def draw(self, axes: Axes) -> None:
        places, values = range(len(self.rows)), np.array([row.value or 0.0 for row in self.rows])
        form: dict[str, Any] = {"color": [row.color for row in self.rows]}
        if any(row.interval for row in self.rows):
            ends = [row.interval or (value, value) for row, value in zip(self.rows, values, strict=True)]
            form |= {"xerr": abs(np.transpose(ends) - values), "ecolor": INK, "capsize": 4}
        bars = axes.barh(places, values, 0.66, **form)
        axes.bar_label(bars, [row.said for row in self.rows], padding=6)
        axes.set_yticks(places, [row.name for row in self.rows])
        axes.invert_yaxis()
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(axis="x", color=LINE)
        axes.set_axisbelow(True)


@dataclass(frozen=True)
class Histogram:
    """The number of things between edges: counts (bins,) and edges (bins + 1,), and a dashed line at the mean."""

    caption: str
    counts: Sequence[float]
    edges: Sequence[float]
    labels: tuple[str, str]
    mean: float
    height: float = 3.0

    def draw(self, axes: Axes) -> None:
        edges = list(self.edges)
        axes.hist(edges[:-1], edges, weights=self.counts, color=PACKED, edgecolor=PAPER, linewidth=0.4)
        axes.axvline(self.mean, color=INK, lw=1, ls="--")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlim=(edges[0], edges[-1]), xlabel=self.labels[0], ylabel=self.labels[1])


@dataclass(frozen=True)
class Influence:
    """Changes of each thing (row) by each other (column), (things, things); nan on the diagonal.

    What is not more than `rounding` is as light as nothing.
    """

    caption: str
    values: Any
    rounding: float
    labels: tuple[str, str]
    scale: str
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
            axes.text(column + 1, row + 1, said, ha="center", va="center", color=PAPER if value > 0.1 else INK)
        axes.set(xticks=range(1, count + 1), yticks=range(1, count + 1))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel=f"{self.labels[0]}\n({self.scale})", ylabel=self.labels[1])


Chart: TypeAlias = Bars | Histogram | Influence


def on_axes(chart: Chart, axes: Axes) -> Any:
    """Draw a chart on axes of the user's; return their figure."""
    with _matplotlib().rc_context(STYLE):
        chart.draw(axes)
        axes.set_title(chart.caption)
    return axes.figure


def picture(charts: Sequence[Chart], title: str = "", below: str = "") -> Figure:
    """Draw charts as one picture, in two rows where they are more than three: a title, and a text below.

    Raises `NeedsMatplotlib` where it is not installed.
    """
    columns = min(len(charts), 3)
    rows = math.ceil(len(charts) / columns)
    title, below = _filled(title, 9 * WIDTH * columns), _filled(below, 14 * WIDTH * columns)
    height = rows * (0.3 + max(chart.height for chart in charts))
    height += 0.3 * len(title.splitlines()) + 0.17 * len(below.splitlines())
    library = _matplotlib()
    with library.rc_context(STYLE):
        figure: Figure = library.figure.Figure(figsize=(WIDTH * columns, height), dpi=150, layout="constrained")
        figure.suptitle(title, fontsize=13, x=0.01, ha="left")
        figure.supxlabel(below, fontsize=9, x=0.01, ha="left", color=FAINT)
        for number, chart in enumerate(charts, 1):
            axes = figure.add_subplot(rows, columns, number)
            chart.draw(axes)
            axes.set_title(_filled(chart.caption, 8 * WIDTH))
        return readable(figure)


def figures(charts: Sequence[Chart]) -> str:
    """Return charts as figures of a page; a line says so if there are none."""
    try:
        return parts.figures([(chart.caption, svg(chart)) for chart in charts])
    except NeedsMatplotlib:
        return parts.lines([NO_FIGURES])


class Table(NamedTuple):
    """A table: its head and rows, and a side per column, as in `parts.table`."""

    rows: Sequence[parts.Row]
    sides: str
    caption: str = ""


@dataclass(frozen=True)
class Report:
    """Lines at the head, tables, figures, and notes."""

    head: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Chart]
    notes: Sequence[str]

    def text(self, width: int = 100) -> str:
        """Return the report as text, with head and notes wrapped at `width`."""

        def wrapped(line: str, hang: str = "") -> str:
            return textwrap.fill(line, width, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False)

        tables = ("\n".join([*filter(None, [t.caption]), *parts.text_table(t.rows, t.sides)]) for t in self.tables)
        notes = "\n".join(wrapped(note, "  ") for note in self.notes)
        return "\n\n".join(["\n".join(map(wrapped, self.head)), *tables, notes])

    def html(self) -> str:
        """Return the report as HTML without scripts or outside references."""
        return parts.joined(
            parts.lines(self.head),
            *(parts.table(rows[0], rows[1:], sides, caption) for rows, sides, caption in self.tables),
            figures(self.charts),
            parts.lines(self.notes),
        )

    def picture(self) -> Figure:
        """Return the charts below the first line of the head, and above the others, as a figure of matplotlib."""
        return picture(self.charts, self.head[0], "\n".join(self.head[1:]))


def svg(chart: Chart) -> str:
    """Return a chart as SVG in HTML, without its caption and as wide as there is room; it names nothing outside."""
    buffer, nothing = StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Several figures share a page: what one names must not be another's.
    library = _matplotlib()
    with library.rc_context(STYLE | {"svg.hashsalt": repr(chart)}):
        figure = library.figure.Figure(figsize=(WIDTH, chart.height), layout="constrained")
        chart.draw(figure.subplots())
        readable(figure).savefig(buffer, format="svg", metadata=nothing)
    drawn = buffer.getvalue()
    head, end, body = drawn[drawn.index("<svg") :].partition(">")
    head = re.sub(r' (xmlns|xmlns:xlink|width|height)="[^"]*"', "", head)
    return f'{head} role="img"{end}' + body.replace("xlink:href", "href").replace("<g id=", "<g class=")


def formats() -> list[str]:
    """Return the endings of files that pictures can be written to. Raises `NeedsMatplotlib`."""
    _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return sorted(FigureCanvasAgg.get_supported_filetypes())


def _matplotlib() -> Any:
    """Return matplotlib; raise `NeedsMatplotlib` where it is not installed."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise NeedsMatplotlib(
            f"pictures need matplotlib, which could not be imported ({error}); install it "
            "with: pip install 'autopack[plot]'"
        ) from error
    return matplotlib


def _filled(text: str, width: int) -> str:
    """Return a text whose lines are no longer than so many characters."""
    return "\n".join(textwrap.fill(line, width) for line in text.splitlines())


def readable(figure: Figure) -> Figure:
    """The same figure, with a mark in its texts for every character that cannot be drawn."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(_NO_CHARACTERS.sub("\ufffd", text.get_text()))
    return figure

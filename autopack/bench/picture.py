"""A benchmark drawn: real tokens per second and peak memory of every arm, as one picture or as figures in a page."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from autopack.bench.batches import BASELINE, GROUPED, STOCK_ROW
from autopack.bench.noise import FASTER, SLOWER
from autopack.bench.result import Outcome, Result
from autopack.bench.table import HEAD, MIB, head_of, mebibytes, notes_of, rows_of
from autopack.pages import parts
from autopack.pages.figure import FAINT, INK, LEAKS, LINE, NO_FIGURES, PACKED, PADDED, STOCK, drawn, poster
from autopack.pages.figure import GROUPED as GROUPED_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(result: Result) -> Figure:
    """Draw the result as a figure of 14 x 5.6 inches: bars are medians, lines the intervals that hold them."""
    title, *below = head_of(result)
    with poster((14, 5.6), title, "\n".join(line for text in below for line in textwrap.wrap(text, 165))) as figure:
        ratios = (7, 3) if _measured(result) else (1,)
        axes = figure.subplots(1, len(ratios), width_ratios=ratios, sharey=True, squeeze=False)[0]
        draw_speeds(axes[0], result)
        axes[0].set_title(_speeds_caption(result))
        if _measured(result):
            draw_memory(axes[1], result)
            axes[1].tick_params(labelleft=False)
            axes[1].set_title(_memory_caption(result))
    return figure


def body(result: Result) -> str:
    """The result as HTML without scripts or outside references; figures where matplotlib is installed."""
    figures = [(_speeds_caption(result), drawn(lambda axes: draw_speeds(axes, result), (5.6, 2.6)))]
    if _measured(result):
        figures.append((_memory_caption(result), drawn(lambda axes: draw_memory(axes, result), (4.6, 2.4))))
    shown = [(caption, svg) for caption, svg in figures if svg is not None]
    return parts.joined(
        parts.lines(head_of(result)),
        parts.table(HEAD, rows_of(result), "<>>>"),
        parts.figures(shown) if shown else parts.lines([NO_FIGURES]),
        parts.lines(notes_of(result)),
    )


def _measured(result: Result) -> bool:
    return any(outcome.peak is not None for outcome in result.outcomes)


def _speeds_caption(result: Result) -> str:
    return f"Real tokens per second, {result.rounds} rounds in turns (× speed of padded)"


def _memory_caption(result: Result) -> str:
    return "Peak memory, MiB" if result.settings.forward else "Peak memory of a step, MiB"


def draw_speeds(axes: Axes, result: Result) -> None:
    """A bar for each arm, with its interval and its ratio to padded."""
    speeds = [result.speed(outcome) if outcome.timed else None for outcome in result.outcomes]
    most = max((speed.high for speed in speeds if speed is not None), default=1.0)
    for row, (outcome, speed) in enumerate(zip(result.outcomes, speeds, strict=True)):
        if speed is None:
            said = textwrap.shorten(outcome.failed or "not timed", 60, placeholder=" ...")
            axes.text(0.01 * most, row, said, va="center", color=FAINT)
            continue
        axes.barh(row, speed.median, **_bar(result, outcome))
        reach = [[speed.median - speed.low], [speed.high - speed.median]]
        for color, width in (("white", 4.0), (INK, 1.6)):  # seen on dark bars and on light ones
            axes.errorbar(speed.median, row, xerr=reach, color=color, linewidth=width, capsize=5, capthick=width)
        axes.text(speed.high + 0.015 * most, row, _label(result, outcome), va="center")
    _name_rows(axes, result)
    axes.set_xlim(0, most * 1.62)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= most * 1.1])
    axes.spines["bottom"].set_bounds(0, most * 1.1)
    axes.grid(axis="x", color=LINE)
    axes.set_axisbelow(True)


def draw_memory(axes: Axes, result: Result) -> None:
    """A bar for each arm whose memory was measured."""
    for row, outcome in enumerate(result.outcomes):
        if outcome.peak is not None:
            bars = axes.barh(row, outcome.peak / MIB, **_bar(result, outcome))
            axes.bar_label(bars, [mebibytes(outcome.peak)], padding=4)
    _name_rows(axes, result)
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _name_rows(axes: Axes, result: Result) -> None:
    axes.set_yticks(range(len(result.outcomes)), [outcome.arm.name for outcome in result.outcomes])
    axes.set_ylim(len(result.outcomes) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _leaks(result: Result, outcome: Outcome) -> bool:
    return outcome.arm == STOCK_ROW and result.same_loss(outcome) is False


def _label(result: Result, outcome: Outcome) -> str:
    ratio, says = result.ratio(outcome), result.says(outcome)
    said = "" if outcome.arm == BASELINE or ratio is None else f"× {ratio}" if says in (FASTER, SLOWER) else says
    wrong = "LEAKS" if _leaks(result, outcome) else "WRONG LOSS" if outcome in result.wrong else ""
    return "  ".join(part for part in (said, wrong) if part)


def _bar(result: Result, outcome: Outcome) -> dict[str, Any]:
    """How the bars of an arm look; those of one that leaks are hatched."""
    leaks = _leaks(result, outcome)
    color = GROUPED_COLOR if outcome.arm.form == GROUPED else PADDED
    if outcome.arm.enabled:
        color = PACKED
    elif outcome.arm == STOCK_ROW:
        color = LEAKS if leaks else STOCK
    return {"height": 0.66, "color": color, "edgecolor": "white", "hatch": "//" if leaks else None}

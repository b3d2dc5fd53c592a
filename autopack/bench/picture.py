"""A benchmark as one picture: real tokens per second and peak memory of every arm."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autopack.bench.arms import BASELINE, GROUPED, STOCK_ROW
from autopack.bench.noise import FASTER, SLOWER
from autopack.bench.result import Outcome, Result
from autopack.bench.table import MIB, about, documents, machine, mebibytes
from autopack.pages.figure import FAINT, INK, LEAKS, LINE, PACKED, PADDED, STOCK, readable
from autopack.pages.figure import GROUPED as GROUPED_COLOR


def draw(result: Result) -> Figure:
    """Draw the result as a figure of 14 x 5.6 inches: bars are medians, lines the intervals that hold them."""
    style: dict[Any, Any] = {"font.size": 12, "axes.titlesize": 13, "axes.titlelocation": "left"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 1.2}
    style["text.parse_math"] = False  # a model's path may hold dollar signs
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(14, 5.6), layout="constrained")
        measured = any(outcome.peak is not None for outcome in result.outcomes)
        ratios = (7, 3) if measured else (1,)
        axes = figure.subplots(1, len(ratios), width_ratios=ratios, sharey=True, squeeze=False)[0]
        figure.suptitle(about(result), fontsize=16, x=0.01, ha="left")
        below = [*textwrap.wrap(machine(result), 165), *textwrap.wrap(documents(result), 165)]
        figure.supxlabel("\n".join(below), fontsize=11, x=0.01, ha="left", color=FAINT)
        draw_speeds(axes[0], result)
        axes[0].set_title(speeds_caption(result))
        if measured:
            draw_memory(axes[1], result)
            axes[1].tick_params(labelleft=False)
            axes[1].set_title(memory_caption(result))
    return readable(figure)


def speeds_caption(result: Result) -> str:
    """What `draw_speeds` shows."""
    return f"Real tokens per second, {result.rounds} rounds in turns (× speed of padded)"


def memory_caption(result: Result) -> str:
    """What `draw_memory` shows."""
    return "Peak memory, MiB" if result.settings.forward else "Peak memory of a step, MiB"


def draw_speeds(axes: Axes, result: Result) -> None:
    """A bar for each arm, with its interval and its ratio to padded."""
    names = [outcome.arm.name for outcome in result.outcomes]
    speeds = [result.speed(outcome) if outcome.timed else None for outcome in result.outcomes]
    most = max((speed.high for speed in speeds if speed is not None), default=1.0)
    for row, (outcome, speed) in enumerate(zip(result.outcomes, speeds, strict=True)):
        if speed is None:
            said = textwrap.shorten(outcome.failed or "not timed", 60, placeholder=" ...")
            axes.text(0.01 * most, row, said, va="center", color=FAINT)
            continue
        leaks = outcome.arm == STOCK_ROW and result.same_loss(outcome) is False
        hatch = "//" if leaks else None
        axes.barh(row, speed.median, height=0.66, color=_color(outcome, leaks), hatch=hatch, edgecolor="white")
        reach = [[speed.median - speed.low], [speed.high - speed.median]]
        for color, width in (("white", 4.0), (INK, 1.6)):  # seen on dark bars and on light ones
            axes.errorbar(speed.median, row, xerr=reach, color=color, linewidth=width, capsize=5, capthick=width)
        axes.text(speed.high + 0.015 * most, row, _label(result, outcome, leaks), va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, most * 1.62), ylim=(len(names) - 0.45, -0.55))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= most * 1.1])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_bounds(0, most * 1.1)
    axes.grid(axis="x", color=LINE)
    axes.set_axisbelow(True)


def _label(result: Result, outcome: Outcome, leaks: bool) -> str:
    ratio, says = result.ratio(outcome), result.says(outcome)
    said = "" if outcome.arm == BASELINE or ratio is None else f"× {ratio}" if says in (FASTER, SLOWER) else says
    wrong = "LEAKS" if leaks else "WRONG LOSS" if outcome in result.wrong else ""
    return "  ".join(part for part in (said, wrong) if part)


def draw_memory(axes: Axes, result: Result) -> None:
    """A bar for each arm whose memory was measured."""
    for row, outcome in enumerate(result.outcomes):
        if outcome.peak is not None:
            leaks = outcome.arm == STOCK_ROW and result.same_loss(outcome) is False
            bars = axes.barh(row, outcome.peak / MIB, height=0.66, color=_color(outcome, leaks), edgecolor="white",
                             hatch="//" if leaks else None)  # fmt: skip
            axes.bar_label(bars, [mebibytes(outcome.peak)], padding=4)
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.set_yticks(range(len(result.outcomes)), [outcome.arm.name for outcome in result.outcomes])
    axes.set_ylim(len(result.outcomes) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _color(outcome: Outcome, leaks: bool) -> str:
    if outcome.arm.enabled:
        return PACKED
    if outcome.arm == STOCK_ROW:
        return LEAKS if leaks else STOCK
    return GROUPED_COLOR if outcome.arm.form == GROUPED else PADDED

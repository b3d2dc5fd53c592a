"""A benchmark drawn: real tokens per second and peak memory of every arm, as one picture or as figures in a page."""

from __future__ import annotations

import textwrap
from typing import Any

from autopack.bench.batches import BASELINE, GROUPED, STOCK_ROW
from autopack.bench.noise import FASTER, SLOWER
from autopack.bench.result import Outcome, Result
from autopack.bench.table import HEAD, MIB, head_of, mebibytes, notes_of, rows_of
from autopack.pages import figure, parts
from autopack.pages.figure import Bar, Bars
from autopack.pages.theme import GROUPED as GROUPED_COLOR
from autopack.pages.theme import LEAKS, PACKED, PADDED, STOCK


def draw(result: Result) -> Any:
    """Draw the result: bars are medians, lines the intervals that hold them."""
    title, *below = head_of(result)
    return figure.picture(charts(result), title, "\n".join(below))


def body(result: Result) -> str:
    """The result as HTML without scripts or outside references; figures where matplotlib is installed."""
    return parts.joined(
        parts.lines(head_of(result)),
        parts.table(HEAD, rows_of(result), "<>>>"),
        figure.figures(charts(result)),
        parts.lines(notes_of(result)),
    )


def charts(result: Result) -> list[Bars]:
    """Bars of speed with their ratios to padded, and bars of memory where any was measured."""
    speeds, memory = [], []
    for outcome in result.outcomes:
        name, form = outcome.arm.name, _looks(result, outcome)
        if outcome.timed:
            speed = result.speed(outcome)
            interval = (speed.low, speed.high)
            speeds.append(Bar(name, speed.median, _label(result, outcome), interval=interval, **form))
        else:
            said = textwrap.shorten(outcome.failed or "not timed", 50, placeholder=" ...")
            speeds.append(Bar(name, None, said))
        peak = None if outcome.peak is None else outcome.peak / MIB
        memory.append(Bar(name, peak, mebibytes(outcome.peak), **form))
    caption = f"Real tokens per second and × speed of padded, {result.rounds} rounds"
    found = [Bars(caption, speeds, numbered=True, width=7)]
    if any(bar.value is not None for bar in memory):
        found.append(Bars(f"Peak memory{'' if result.settings.forward else ' of a step'}, MiB", memory, width=4.6))
    return found


def _leaks(result: Result, outcome: Outcome) -> bool:
    return outcome.arm == STOCK_ROW and result.same_loss(outcome) is False


def _label(result: Result, outcome: Outcome) -> str:
    ratio, says = result.ratio(outcome), result.says(outcome)
    said = "" if outcome.arm == BASELINE or ratio is None else f"× {ratio}" if says in (FASTER, SLOWER) else says
    wrong = "LEAKS" if _leaks(result, outcome) else "WRONG LOSS" if outcome in result.wrong else ""
    return "  ".join(part for part in (said, wrong) if part)


def _looks(result: Result, outcome: Outcome) -> dict[str, Any]:
    """Colour and hatching of an arm's bars; those of one that leaks are hatched."""
    leaks = _leaks(result, outcome)
    color = GROUPED_COLOR if outcome.arm.form == GROUPED else PADDED
    if outcome.arm.enabled:
        color = PACKED
    elif outcome.arm == STOCK_ROW:
        color = LEAKS if leaks else STOCK
    return {"color": color, "hatched": leaks}

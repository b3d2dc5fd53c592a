"""Errors of the call modes of an audit, drawn on a logarithmic scale beside what counts as rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from autopack.pages.figure import FAINT, GROUPED, INK, LEAKS, LIMIT, LINE, PACKED, PADDED

LEAST, MOST = 1e-9, 10.0
"""Errors below and above these are drawn at the edge; 0 is below."""
MARKS = {"vs alone, or stock": ("o", PACKED), "influence": ("D", LEAKS), "gradients": ("^", GROUPED),
         "loss": ("s", PADDED)}  # fmt: skip
"""What is measured, its marker and its colour; the order is that of the columns of the table."""


class ModeErrors(NamedTuple):
    """One call mode: an error of each kind, None where it was not measured, and the most that is rounding."""

    name: str
    errors: tuple[float | None, ...]
    limits: tuple[float, ...]
    raised: bool = False


def draw_errors(axes: Any, modes: Sequence[ModeErrors]) -> None:
    """A line of markers for each mode, and beside each kind of error where rounding ends."""
    rows = range(len(modes))
    axes.hlines(rows, LEAST, MOST, color=LINE, linewidth=1, zorder=0)
    for limit, color in ((2, FAINT), (0, LIMIT)):  # of gradients, which is that of the loss or near it; of results
        for row, mode in enumerate(modes):
            axes.vlines(mode.limits[limit], row - 0.5, row + 0.5, color=color, linewidth=1.2, zorder=1)
    for number, (name, (marker, color)) in enumerate(MARKS.items()):
        measured = [row for row, mode in enumerate(modes) if mode.errors[number] is not None]
        found = [_drawn(modes[row].errors[number]) for row in measured]
        shown = {"color": color, "edgecolor": INK, "linewidth": 0.5, "zorder": 2 + number, "clip_on": False}
        axes.scatter(found, measured, 26, marker=marker, label=name, **shown)
    for row, mode in enumerate(modes):
        if mode.raised:
            axes.text(MOST, row, "raised", color=LIMIT, ha="right", va="center")
    axes.set_yticks(rows, [mode.name for mode in modes])
    ticks = [LEAST, 1e-7, 1e-5, 1e-3, 1e-1, MOST]
    axes.set_xscale("log")
    axes.set_xticks(ticks, ["0", *(f"{tick:.0e}" for tick in ticks[1:-1]), "≥ 10"])
    axes.minorticks_off()
    axes.set(xlim=(LEAST, MOST), ylim=(max(len(modes), 1) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0, pad=8)
    axes.spines["left"].set_visible(False)
    axes.figure.legend(loc="outside upper right", ncols=len(MARKS), handletextpad=0.1, columnspacing=0.9, fontsize=9)


def _drawn(error: float | None) -> float:
    """Where an error is drawn; one that is no number is as bad as any."""
    if error is None or math.isnan(error):
        return MOST
    return min(max(error, LEAST), MOST)

"""Panels of the picture of an estimate: lengths, padding by batch size, expected speed, and how full rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopack.packing.arms import Arm
from autopack.pages.figure import GROUPED, INK, LINE, PACKED, PADDED


def draw_lengths(axes: Any, found: np.ndarray) -> None:
    """A histogram of the tokens of documents, with their mean."""
    edges = np.linspace(0, max(1, found.max()), 61)
    axes.hist(found, edges, color=PACKED)
    axes.axvline(found.mean(), color=INK, lw=1, ls="--", label="mean")
    axes.set(xlabel="tokens", ylabel="documents", xlim=(0, edges[-1]))
    axes.legend(frameon=False, fontsize=8)


def draw_padding(axes: Any, padded: Sequence[Arm]) -> None:
    """The share of padding by the size of padded batches, in both orders, which take turns in `padded`."""
    for number, (label, color) in enumerate({"random order": PADDED, "grouped by length": GROUPED}.items()):
        shares = [arm.padding * 100 for arm in padded[number::2]]
        axes.bar(np.arange(len(shares)) + 0.4 * number - 0.2, shares, 0.4, color=color, label=label)
    axes.set_xticks(range(len(padded) // 2), [str(arm.batch_size) for arm in padded[::2]])
    axes.set(xlabel="documents per padded batch", ylabel="padding, % of all columns", ylim=(0, 100))
    axes.legend(frameon=False, fontsize=8)


def draw_speed(axes: Any, compared: Sequence[Arm]) -> None:
    """The expected speed of every arm."""
    bars = axes.barh([_name(arm) for arm in compared], [arm.speedup for arm in compared], color=_colors(compared))
    axes.bar_label(bars, [f"{arm.speedup:.2f} x" for arm in compared], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="expected speed", xlim=(0, 1.15 * max(arm.speedup for arm in compared)))


def draw_fill(axes: Any, compared: Sequence[Arm]) -> None:
    """How full the rows of every arm are: real tokens, of all columns, in percent."""
    names = [_name(arm) for arm in compared]
    axes.barh(names, [100] * len(names), color=LINE)
    bars = axes.barh(names, [100 * (1 - arm.padding) for arm in compared], color=_colors(compared))
    for bar, arm in zip(bars, compared, strict=True):
        axes.text(102, bar.get_y() + bar.get_height() / 2, f"{1 - arm.padding:.2%}", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="real tokens, % of all columns", xlim=(0, 118))
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _name(arm: Arm) -> str:
    return f"padded, {arm.order}" if arm.order else arm.name.replace("_", "-")


def _colors(compared: Sequence[Arm]) -> list[str]:
    return [{"random": PADDED, "grouped": GROUPED}.get(arm.order or "", PACKED) for arm in compared]

"""The result of the demo as one picture: batch and row, speed, losses, and the leak before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from autopack.demo.training import Leak, LlamaComparison
from autopack.pages.figure import FAINT, GROUPED, PACKED, PADDED, poster

PADDING = "#eceff2"
DOCUMENTS = (PACKED, "#4f9bb3", GROUPED)
NOTHING = 1e-7
"""Influences below this are drawn as none: float32 cannot tell them from 0."""


def draw(result: LlamaComparison) -> Figure:
    """Draw the result as a figure of 16 x 8.4 inches."""
    times = f"{result.speedup('packed'):.1f}×"
    title = f"Packed rows: {times} the speed of padded batches, with the same losses and no leak"
    if not result.succeeded:
        title = "Packed and padded training differ: this should not happen"
    said = f"Llama, {result.parameters / 1e6:.1f} M parameters, float32, {result.threads} CPU threads; "
    said += f"{result.settings.steps} steps of {result.settings.batch_size} documents of Python's documentation; "
    with poster((16, 8.4), title, f"{said}same seed, same order") as figure:
        places: list[Any] = [["padded", "losses", "losses"], ["packed", "speed", "leaks"]]
        axes = figure.subplot_mosaic(places, width_ratios=(1.05, 1, 1))
        _draw_documents(axes["padded"], axes["packed"], result.shown_batch)
        _draw_losses(axes["losses"], result)
        _draw_speed(axes["speed"], result)
        _draw_leaks(axes["leaks"], result)
    return figure


def _draw_documents(padded: Axes, packed: Axes, lengths: Sequence[int]) -> None:
    """The documents of one batch, a row each and padded to the longest; and end to end, folded to the same width."""
    longest, start = max(lengths), 0
    padded.barh(range(len(lengths)), longest, height=0.82, color=PADDING)
    for number, length in enumerate(lengths):
        color = DOCUMENTS[number % len(DOCUMENTS)]
        padded.barh(number, length, height=0.82, color=color)
        for line in range(start // longest, (start + length - 1) // longest + 1):
            left, right = max(start, line * longest), min(start + length, (line + 1) * longest)
            packed.barh(line, right - left, left=left - line * longest, height=0.82, color=color)
        start += length
    share = 1 - sum(lengths) / (longest * len(lengths))
    padded.set_title(f"One padded batch: {len(lengths)} documents, {share:.0%} padding")
    packed.set_title("The same documents in one packed row (folded)")
    for axes in (padded, packed):
        axes.set(xlim=(0, longest), ylim=(len(lengths) - 0.5, -0.5))
        axes.set_axis_off()


def _draw_losses(axes: Axes, result: LlamaComparison) -> None:
    steps = range(1, len(result.losses["padded"]) + 1)
    axes.plot(steps, result.losses["padded"], color=PADDED, linewidth=8, solid_capstyle="round", label="padded batches")
    axes.plot(steps, result.losses["packed"], color=PACKED, linewidth=2, label="packed rows")
    axes.set(xlim=(0.5, len(steps) + 0.5), xlabel="optimizer step")
    axes.set_title(f"Loss of every step: largest relative difference {max(result.loss_differences):.0e}")
    axes.grid(axis="y", color=PADDING)
    axes.legend(loc="upper right")


def _draw_speed(axes: Axes, result: LlamaComparison) -> None:
    speeds = [result.real_tokens / seconds for seconds in result.seconds["training"].values()]
    bars = axes.bar(["padded batches", "packed rows"], speeds, color=[PADDED, PACKED], width=0.62)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=4, fontsize=14)
    axes.set(ylim=(0, max(speeds) * 1.16), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.set_title(f"Real tokens per second: {result.speedup('packed'):.1f}×")


def _draw_leaks(axes: Axes, result: LlamaComparison) -> None:
    """Both matrices of influences beside each other; a document and itself, and the gap between them, are grey."""

    def matrix(leak: Leak) -> np.ndarray:
        found = np.maximum(leak.influence, NOTHING / 10)  # a logarithmic scale cannot draw 0
        np.fill_diagonal(found, np.nan)
        return found

    stock, enabled = matrix(result.stock_leak), matrix(result.leak)
    count = len(stock)
    reds = LinearSegmentedColormap.from_list("leak", ["#fbe3d6", "#e07b4f", "#8c1c13"])
    colors = reds.with_extremes(under="white", bad=PADDING)
    gap = np.full((count, 1), np.nan)
    axes.imshow(np.hstack([stock, gap, enabled]), cmap=colors, norm=LogNorm(NOTHING, 10), aspect="auto")
    numbers = [str(number + 1) for number in range(count)]
    axes.set_xticks([*range(count), *range(count + 1, 2 * count + 1)], numbers * 2)
    axes.set_yticks(range(count), numbers)
    axes.tick_params(length=0)
    said = []
    for name, leak in (("stock", result.stock_leak), ("enabled", result.leak)):
        others = leak.influence_of_others
        said.append(f"{name}: {'no change' if others < NOTHING else f'up to {others:.1g} std'}")
    axes.set_xlabel("        ".join(said), color=FAINT)
    axes.set_title("Leak from document (column) to (row)")

"""The result of the demo as one picture: batch and row, speed, losses, and the leak before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopack.demo.leak import Leak
from autopack.demo.training import Comparison
from autopack.errors import AutopackError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

PADDED = "#b8bec7"
PACKED = "#1f6f8b"
DOCUMENTS = ("#1f6f8b", "#4f9bb3", "#8fc1cf")
PADDING = "#eceff2"
INK = "#22303c"
FAINT = "#6b7885"
NOTHING = 1e-7
"""Influences below this are drawn as none: float32 cannot tell them from 0."""


class PictureImpossible(AutopackError):
    """The picture could not be drawn or written."""


def check_drawable(path: Path) -> None:
    """Raise `PictureImpossible` if a picture could not be written to the path."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise PictureImpossible(
            f"--plot needs matplotlib, which could not be imported ({error}); "
            "install it with: pip install 'autopack[plot]'"
        ) from error
    if not path.parent.is_dir():
        raise PictureImpossible(f"--plot {path}: there is no directory {path.parent}; create it or name another one")
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise PictureImpossible(f"--plot {path}: wanted a file name that ends with one of {', '.join(formats)}")


def draw(result: Comparison) -> Figure:
    """Draw the result as a figure of 16 x 8 inches."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 12,
        "font.family": "DejaVu Sans",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 13,
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(16, 8.4))
        grid = figure.add_gridspec(
            2, 3, left=0.045, right=0.975, top=0.81, bottom=0.11, hspace=0.42, wspace=0.2, width_ratios=(1.05, 1, 1)
        )
        _head(figure, result)
        stacks = grid[:, 0].subgridspec(2, 1, height_ratios=_heights(result.shown_batch), hspace=0.28)
        _draw_padded(figure.add_subplot(stacks[0]), result.shown_batch)
        _draw_packed(figure.add_subplot(stacks[1]), result.shown_batch)
        _draw_losses(figure.add_subplot(grid[0, 1:]), result)
        _draw_speed(figure.add_subplot(grid[1, 1]), result)
        _draw_leaks(figure, grid[1, 2], result)
    return figure


def _head(figure: Figure, result: Comparison) -> None:
    if result.succeeded:
        title = f"Packed rows: {result.speedup:.1f}× the speed of padded batches, with the same losses and no leak"
    else:
        title = "Packed and padded training differ: this should not happen"
    settings = result.settings
    figure.text(0.045, 0.945, title, fontsize=22, fontweight="bold", va="center")
    figure.text(
        0.045,
        0.895,
        f"Llama, {result.parameters / 1e6:.1f} M parameters, float32, {result.threads} CPU threads; "
        f"{settings.steps} steps of {settings.batch_size} documents of Python's documentation; same seed, same order",
        fontsize=13,
        color=FAINT,
        va="center",
    )


def _heights(lengths: Sequence[int]) -> tuple[int, int]:
    # At least 3: the packed row's panel also needs room for its title.
    return len(lengths), max(3, _lines(lengths))


def _lines(lengths: Sequence[int]) -> int:
    return -(-sum(lengths) // max(lengths))


def _draw_padded(axes: Axes, lengths: Sequence[int]) -> None:
    longest = max(lengths)
    share = 1 - sum(lengths) / (longest * len(lengths))
    for row, length in enumerate(lengths):
        axes.barh(row, longest, height=0.82, color=PADDING)
        axes.barh(row, length, height=0.82, color=DOCUMENTS[row % len(DOCUMENTS)])
    emptiest = min(range(len(lengths)), key=lambda row: lengths[row])
    axes.text(longest * 0.985, emptiest, "padding", ha="right", va="center_baseline", color=FAINT)
    axes.set_title(f"One padded batch: {len(lengths)} documents, {share:.0%} padding")
    _blank(axes, longest, len(lengths))


def _draw_packed(axes: Axes, lengths: Sequence[int]) -> None:
    longest, start = max(lengths), 0
    for number, length in enumerate(lengths):
        colour = DOCUMENTS[number % len(DOCUMENTS)]
        left = length
        while left:
            line, column = divmod(start, longest)
            piece = min(left, longest - column)
            axes.barh(line, piece, left=column, height=0.82, color=colour)
            start, left = start + piece, left - piece
    axes.set_title("The same documents in one packed row (folded)")
    _blank(axes, longest, _heights(lengths)[1])


def _blank(axes: Axes, width: int, rows: int) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_axis_off()


def _draw_losses(axes: Axes, result: Comparison) -> None:
    steps = range(1, len(result.padded_losses) + 1)
    axes.plot(steps, result.padded_losses, color=PADDED, linewidth=8, solid_capstyle="round", label="padded batches")
    axes.plot(steps, result.packed_losses, color=PACKED, linewidth=2, label="packed rows")
    axes.set_xlim(0.5, len(result.padded_losses) + 0.5)
    axes.set_xlabel("optimizer step")
    axes.set_title(f"Loss of every step: largest relative difference {max(result.loss_differences):.0e}")
    axes.grid(axis="y", color=PADDING)
    axes.legend(loc="upper right", fontsize=12)


def _draw_speed(axes: Axes, result: Comparison) -> None:
    values = [result.real_tokens / result.padded_seconds, result.real_tokens / result.packed_seconds]
    axes.bar(["padded batches", "packed rows"], values, color=[PADDED, PACKED], width=0.62)
    for place, value in enumerate(values):
        axes.annotate(f"{value:,.0f}", (place, value), (0, 4), textcoords="offset points", ha="center", fontsize=14)
    axes.set_ylim(0, max(values) * 1.16)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0, labelsize=12)
    axes.set_title(f"Real tokens per second: {result.speedup:.1f}×")


def _draw_leaks(figure: Figure, place: SubplotSpec, result: Comparison) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    reds = LinearSegmentedColormap.from_list("leak", ["#fbe3d6", "#e07b4f", "#8c1c13"])
    colours = reds.with_extremes(under="white", bad=PADDING)
    norm = LogNorm(vmin=NOTHING, vmax=10)
    panels = place.subgridspec(1, 2, wspace=0.12)
    for number, (name, leak) in enumerate((("stock", result.stock_leak), ("enabled", result.leak))):
        axes = figure.add_subplot(panels[number])
        axes.imshow(_without_diagonal(leak), cmap=colours, norm=norm, aspect="auto")
        documents = range(len(leak.influence))
        axes.set_xticks(documents, [str(n + 1) for n in documents], fontsize=11)
        axes.set_yticks(documents, [str(n + 1) if number == 0 else "" for n in documents], fontsize=11)
        axes.tick_params(length=0)
        others = leak.influence_of_others
        axes.set_xlabel(f"{name}: {'no change' if others < NOTHING else f'up to {others:.1g} std'}")
        for spine in axes.spines.values():
            spine.set_visible(True)
            spine.set_color(FAINT)
        if number == 0:
            axes.set_title("Leak from document (column) to (row)")


def _without_diagonal(leak: Leak) -> list[list[float]]:
    """The influences, with NaN (drawn grey) where a document would be its own neighbour and 0 made drawable."""
    return [
        [float("nan") if i == j else max(value, NOTHING / 10) for j, value in enumerate(row)]
        for i, row in enumerate(leak.influence)
    ]

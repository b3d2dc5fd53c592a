"""A benchmark as HTML: what the table says, with speed and memory drawn."""

from __future__ import annotations

from autopack.bench.result import Result
from autopack.bench.table import HEAD, head_of, notes_of, rows_of
from autopack.pages import parts
from autopack.pages.figure import NO_FIGURES, drawn


def body(result: Result) -> str:
    """The result as a fragment without scripts or outside references; figures where matplotlib is installed."""
    figures = _figures(result)
    return parts.joined(
        parts.lines(head_of(result)),
        parts.table(HEAD, rows_of(result), "<>>>"),
        parts.figures(figures) if figures else parts.lines([NO_FIGURES]),
        parts.lines(notes_of(result)),
    )


def _figures(result: Result) -> list[tuple[str, str]]:
    try:
        from autopack.bench import picture
    except ImportError:  # of matplotlib
        return []
    found = [(picture.speeds_caption(result), drawn(lambda axes: picture.draw_speeds(axes, result), (5.6, 2.6)))]
    if any(outcome.peak is not None for outcome in result.outcomes):
        memory = drawn(lambda axes: picture.draw_memory(axes, result), (4.6, 2.4))
        found.append((picture.memory_caption(result), memory))
    return [(caption, svg) for caption, svg in found if svg is not None]

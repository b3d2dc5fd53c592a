"""A finding in pieces, of which text, a page and a picture are made."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopack.pages import figure, parts


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
    charts: Sequence[figure.Chart]
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
            figure.figures(self.charts),
            parts.lines(self.notes),
        )

    def picture(self) -> Any:
        """Return the charts below the first line of the head, and above the others, as a figure of matplotlib."""
        return figure.picture(self.charts, self.head[0], "\n".join(self.head[1:]))

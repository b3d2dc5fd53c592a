"""Pieces of HTML, made by templates that escape every text (jinja2 comes with torch), and tables as
text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

Row = Sequence[str]


def text_table(rows: Sequence[Row], sides: str) -> list[str]:
    """Return a table as lines of text; `sides` is as in `table`, and a row may have fewer cells."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, cells)) for cells in zip(*whole, strict=True)]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]


def _part(name: str, *values: Any, **options: Any) -> str:
    """Return the HTML that the macro `name` of parts.html makes of these values."""
    return str(getattr(_templates().get_template("parts.html").module, name)(*values, **options))


table = partial(_part, "table")
"""A table of a head, rows, sides and a caption; `sides` has a character per column, < for texts and
> for numbers. A row may end early."""
lines = partial(_part, "lines")
"""A paragraph for each text; all may be `strong`."""
figure = partial(_part, "figure")
"""A figure, of its SVG and its largest width in em."""


facts = partial(_part, "facts")
"""A table of several things' facts: for each its name and pairs of a name and a text. The first
name is the caption."""
report = partial(_part, "report")
"""A report, of the lines at its head, its tables (rows, sides and caption), HTML and notes."""


def whole(title: str, pairs: Iterable[tuple[str, str]], body: str) -> str:
    """Return a whole HTML page with a title, facts (names and texts) and a body.

    It needs no other file.
    """
    return _templates().get_template("page.html").render(title=title, pairs=pairs, body=body)


@cache
def _templates() -> Environment:
    """Return the jinja2 environment that finds this package's templates."""
    # Here alone: what jinja2 imports may be shadowed by a script under `autopack run` that has an
    # html.py of its own.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("autopack.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

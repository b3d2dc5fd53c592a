"""Pieces of HTML, made by templates that escape every text (jinja2 comes with torch), and tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

Row = Sequence[str]


def text_table(rows: Sequence[Row], sides: str) -> list[str]:
    """Return a table as lines of text, by a head and rows; `sides` is as in `table`, and a row may end early."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, cells)) for cells in zip(*whole, strict=True)]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]


def table(head: Row, rows: Iterable[Row], sides: str, caption: str = "") -> str:
    """A table; `sides` has a character per column, < for texts and > for numbers. A row may end early."""
    return _part("table", head, [list(row) for row in rows], sides, caption)


def facts(pairs: Iterable[tuple[str, str]], caption: str = "") -> str:
    """Return a list of facts: a name and a text in each line."""
    return _part("facts", [(caption, list(pairs))])


def groups_of_facts(groups: Iterable[tuple[str, Iterable[tuple[str, str]]]], caption: str) -> str:
    """Facts of several things in one table, each under its name; those of the whole have none."""
    return _part("facts", [(caption, []), *((name, list(pairs)) for name, pairs in groups)])


def lines(texts: Iterable[str], strong: bool = False) -> str:
    """A paragraph for each text."""
    return _part("lines", list(texts), strong)


def named(pieces: Iterable[tuple[str, str]]) -> str:
    """Pieces of HTML, each under its name."""
    return _part("named", [(name, _markup(piece)) for name, piece in pieces])


def figures(shown: Iterable[tuple[str, str]]) -> str:
    """Figures beside each other, or below where there is no room: the caption of each, and its SVG or table."""
    return _part("figures", [(caption, _markup(piece)) for caption, piece in shown])


def joined(*pieces: str) -> str:
    """Pieces of HTML as one."""
    return f"<div>{''.join(pieces)}</div>"


def whole(title: str, pairs: Iterable[tuple[str, str]], body: str) -> str:
    """A page that needs nothing but itself, light or dark as its reader has it."""
    return _templates().get_template("page.html").render(title=title, pairs=list(pairs), body=_markup(body))


def _part(name: str, *values: Any) -> str:
    return str(getattr(_templates().get_template("parts.html").module, name)(*values))


def _markup(piece: str) -> str:
    from markupsafe import Markup

    return Markup(piece)


@cache
def _templates() -> Environment:
    # Here alone: what jinja2 imports may be shadowed by a script under `autopack run` that has an html.py of its own.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("autopack.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

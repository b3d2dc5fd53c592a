"""Which models are run through which kernels, small enough for an interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compat.matrix import tomllib

Rows = tuple[tuple[int, ...], ...]
ROWS: Rows = ((21, 1, 6, 4), (19, 13))
"""Documents of every row, in tokens. With chunks of 16 some end inside of one, and one spans
two."""
LONG: Rows = ((70, 1, 9), (41, 39))
"""The same for the kernels of fla, whose chunks have 64 tokens."""
SHORT: dict[bool, Rows] = {False: ((17, 1, 3),), True: ((65, 1, 3),)}
"""The least that has a document across chunks and one of a single token, by whether rows are
long."""


@dataclass(frozen=True)
class Cell:
    """A row of kernels.toml."""

    kernels: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    long: bool = False
    type: str = ""
    flash: bool = False
    liger: str = ""
    loss: bool = False

    def rows(self, short: bool) -> Rows:
        """The documents of its rows."""
        return SHORT[self.long] if short else LONG if self.long else ROWS


MIXERS, ATTENTION, LIGER = (
    {name: Cell(**row) for name, row in rows.items()}
    for rows in tomllib.loads(
        Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8")
    ).values()
)
CELLS = {**MIXERS, **ATTENTION, **LIGER}

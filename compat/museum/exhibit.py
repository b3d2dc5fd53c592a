"""The form of an exhibit, and the search for all of them.

An exhibit is one file in `models/` or `data/` that ends with `EXHIBIT = Exhibit(...)`. Its name is
the file's. Files whose names begin with `_` hold what several exhibits share. Beside imports, the
docstring and the statement of `EXHIBIT`, a file has at most `MOST_STATEMENTS` statements: the
mistake, and its sound twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDERS = ("models", "data")
MOST_STATEMENTS = 16

KINDS = (
    "masks",
    "positions",
    "windows and chunks",
    "sinks",
    "states",
    "convolutions",
    "kernels' arguments",
    "caches",
    "routers",
    "heads",
    "images",
    "norms",
    "biases",
    "long rows",
    "checkpointing",
    "compiled graphs",
    "evaluation",
    "encoder-decoders",
    "columns",
    "labels",
    "counting",
    "padding",
    "samplers",
    "resume",
    "truncation",
    "pairs",
)
"""Kinds of mistakes, in the order of the page."""


@dataclass(frozen=True)
class Exhibit:
    """A mistake that was reported somewhere, made again, and the same thing without it."""

    kind: str
    """One of `KINDS`."""
    reported: tuple[str, ...]
    """Reports of it by project and number, such as "axolotl#1234"."""
    says: str
    """One or two sentences of our own: what went wrong."""
    mistaken: Callable[[], Any]
    """Return a model, or a trainer, that makes the mistake. Seeds are set before it is called."""
    sound: Callable[[], Any]
    """Return the same without the mistake."""
    unfound: str = ""
    """The reason why the auditor cannot find it; empty for all that it has to find."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a kind that is none, or a report without a number."""
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; found {self.kind!r}")
        wrong = [source for source in self.reported if not source.partition("#")[2].isdigit()]
        if wrong or not self.reported:
            raise ValueError(
                f"reported must name a project and a number, as 'axolotl#1234' does; found {wrong}"
            )


def names() -> list[str]:
    """Return the names of all exhibits, such as "models.mask_without_positions"."""
    here = Path(__file__).parent
    paths = [path for folder in FOLDERS for path in sorted((here / folder).glob("[!_]*.py"))]
    return [f"{path.parent.name}.{path.stem}" for path in paths]


def load(name: str) -> Exhibit:
    """Return the exhibit of a name."""
    found = import_module(f"compat.museum.{name}").EXHIBIT
    assert isinstance(found, Exhibit)
    return found

"""The form of an exhibit, and the search for all of them.

An exhibit is one file in `models/` or `data/`, and its name is the file's. `mistaken` there makes the
mistake, and `sound` is the same without it: a class of `Plain`, or the part of one, or what makes a
model; arguments by which a trainer of `data/_trainer.py` differs, or what makes one. Where `sound`
is not there it is `Plain`, or that trainer. `stock` is a type of transformers, whose twin is
enabled. Seeds are set before anything is made. Its docstring has a title; a kind, of `KINDS`, and
reports of it by project and number, as in "masks: axolotl#1234"; and a sentence or two of our own on
what went wrong. Files whose names begin with `_` hold what several exhibits share. Beside imports,
the docstring and these names, a file has at most `MOST_STATEMENTS` statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import autopack
from autopack import tiny
from compat.museum.models._plain import Plain, of

FOLDERS = ("models", "data")
MOST_STATEMENTS = 16
KINDS = """masks, positions, windows and chunks, states, convolutions, kernels' arguments, caches, routers, heads,
images, norms, biases, long rows, checkpointing, compiled graphs, evaluation, encoder-decoders, columns, labels,
counting, padding, samplers, resume, truncation, pairs""".replace("\n", " ").split(", ")
"""Kinds of mistakes, in the order of the page."""


@dataclass(frozen=True)
class Exhibit:
    """A mistake that was reported somewhere, made again, and the same thing without it."""

    kind: str
    reported: list[str]
    says: str
    mistaken: Callable[[], Any]
    sound: Callable[[], Any]


def names() -> list[str]:
    """Return the names of all exhibits, such as "models.mask_without_positions"."""
    here = Path(__file__).parent
    paths = [path for folder in FOLDERS for path in sorted((here / folder).glob("[!_]*.py"))]
    return [f"{path.parent.name}.{path.stem}" for path in paths]


def load(name: str) -> Exhibit:
    """Return the exhibit of a name."""
    module: Any = import_module(f"compat.museum.{name}")
    if hasattr(module, "stock"):
        mistaken, sound = (
            partial(_of_transformers, *module.stock, enabled=e) for e in (False, True)
        )
    else:
        plain: Any = {} if name.startswith("data.") else Plain
        mistaken, sound = _maker(module.mistaken), _maker(getattr(module, "sound", plain))
    return Exhibit(*parsed(module.__doc__), mistaken, sound)


def _of_transformers(kind: str, task: str = "causal-lm", *, enabled: bool) -> Any:
    model = tiny.build(kind, task=task, attn_implementation="eager")
    if enabled:
        autopack.enable(model)
    return model


def _maker(found: Any) -> Any:
    if isinstance(found, dict):
        from compat.museum.data import _trainer

        return partial(_trainer.differing, found)
    is_part = isinstance(found, type) and not issubclass(found, Plain)
    return of(found) if is_part else found


def parsed(docstring: str) -> tuple[str, list[str], str]:
    """Return the kind, the reports and the sentences of a docstring; raise `ValueError` for a kind
    that is none, or a report without a number."""
    _, about, says = (" ".join(part.split()) for part in docstring.split("\n\n"))
    kind, _, reported = about.partition(": ")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; found {kind!r}")
    sources = reported.split(", ")
    if wrong := [source for source in sources if not source.partition("#")[2].isdigit()]:
        raise ValueError(
            f"reports must name a project and a number, as axolotl#1234 does; found {wrong}"
        )
    return kind, sources, says

"""What commands share: quiet measurements, the versions that they are recorded with, and how
records are written."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """On one thread, with errors alone in the logs; what was set comes back."""
    import torch
    import transformers

    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    disabled = logging.root.manager.disable
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(verbosity)
        logging.disable(disabled)


def packages(*names: str) -> dict[str, str]:
    """The versions that a run is recorded with, by package."""
    import autopack

    found = {name: version(name) for name in ("torch", "transformers", *names)}
    return {"autopack": autopack.__version__, "python": platform.python_version(), **found}


def write_json(path: Path, data: Any, depth: int | None = None) -> None:
    """Write a record, indented; or with `depth` a line for each entry down to it, which diffs can
    show."""
    text = (
        json.dumps(data, indent=1, ensure_ascii=False) if depth is None else by_lines(data, depth)
    )
    path.write_text(text + "\n", encoding="utf-8")


def by_lines(data: Any, depth: int) -> str:
    """JSON in which every entry of a dictionary of dictionaries, down to a depth, has a line."""
    if not depth or not isinstance(data, dict):
        return json.dumps(data)
    entries = [f"{json.dumps(name)}: {by_lines(value, depth - 1)}" for name, value in data.items()]
    return "{\n" + textwrap.indent(",\n".join(entries), " ") + "\n}"


def said(error: BaseException) -> str:
    """An error in one line: its name and its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def short(reason: str, most: int = 240) -> str:
    """A reason in one line that is the same in every run: no addresses, no directories, not too
    long."""
    line = re.sub(r"0x[0-9a-f]{6,}", "0x", " ".join(reason.split()))
    line = re.sub(r"(/[\w.+-]+)+/(?=[\w.-]+)", "", line)
    return line if len(line) <= most else line[: most - 1] + "…"


def gradients_apart(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """The largest error of gradients by name, of the norm of each; of those that are all but zero,
    which have no scale of their own, of a thousandth of the largest norm."""
    least = 1e-3 * max((gradient.norm().item() for gradient in wanted.values()), default=0.0)
    errors = (
        (found[name].float() - gradient).norm().item() / max(gradient.norm().item(), least)
        for name, gradient in wanted.items()
    )
    return max(errors, default=0.0)

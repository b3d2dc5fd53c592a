"""Cells that have been measured, kept in the cache so that a run goes on where an earlier one was
stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compat.environments import cache_directory
from compat.matrix import COMPAT, ROOT

_MEASURING = ("cells.py", "outcome.py", "exactness.py", "standins.py", "old_releases.py")
Key = tuple[str, str, str]
"""Task, model type and mode."""


def code_digest(*more: Path) -> str:
    """A name for what a measurement depends on: autopack's code and records, and the code of compat
    which measures.

    `more` are other files that it depends on.
    """
    package = ROOT / "autopack"
    files = [
        *sorted(package.rglob("*.py")),
        *sorted(package.rglob("*.json")),
        *(COMPAT / name for name in _MEASURING),
        *more,
    ]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def key_of(cell: dict[str, Any]) -> Key:
    """What a cell is told from others by, within a release."""
    return cell["task"], cell["type"], cell["mode"]


class Finished:
    """The finished cells of one release: a file of JSON lines, of which the last one of a cell
    counts."""

    def __init__(self, release: str, digest: str) -> None:
        self.path, self.digest = cache_directory() / "cells" / f"{release}.jsonl", digest

    def load(self) -> dict[Key, dict[str, Any]]:
        """The cells that were measured with this code."""
        found: dict[Key, dict[str, Any]] = {}
        for line in (
            self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        ):
            try:
                cell = json.loads(line)
            except ValueError:
                continue  # an empty one, or one of a run that was killed while it wrote
            if cell.pop("code") == self.digest:
                found[key_of(cell)] = cell
        return found

    def add(self, cells: Iterable[dict[str, Any]]) -> None:
        """Append cells, each on a line of its own whatever a killed run has left at the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(
                f"\n{json.dumps({**cell, 'code': self.digest}, ensure_ascii=False)}"
                for cell in cells
            )

"""Cells that have been measured, kept in the cache so that a run goes on where an earlier one was stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compat.matrix import COMPAT, ROOT

_MEASURING = ("cells.py", "exactness.py", "standins.py", "old_releases.py")
Key = tuple[str, str, str]
"""Task, model type and mode."""


def code_digest(*more: Path) -> str:
    """A name for what a measurement depends on: autopack's code and records, and the code of compat which measures.

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
    """The finished cells of one release: a file of JSON lines, of which the last one of a cell counts."""

    def __init__(self, cache: Path, release: str, digest: str) -> None:
        self.path, self.digest = cache / "cells" / f"{release}.jsonl", digest

    def load(self, of_older_code: bool = False) -> dict[Key, dict[str, Any]]:
        """The cells measured with this code, or also those `of_older_code`."""
        found: dict[Key, dict[str, Any]] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        for line in lines:
            try:
                cell = json.loads(line)
            except ValueError:
                continue  # the last line of a run that was killed while it wrote
            if of_older_code or cell.pop("code", None) == self.digest:
                cell.pop("code", None)
                found[key_of(cell)] = cell
        return found

    def add(self, cells: Iterable[dict[str, Any]]) -> None:
        """Append cells."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", encoding="utf-8") as file:
            if self._is_broken():
                file.write("\n")
            file.writelines(json.dumps({**cell, "code": self.digest}, ensure_ascii=False) + "\n" for cell in cells)

    def _is_broken(self) -> bool:
        """Whether a killed run left an unfinished line, which must not swallow the next one."""
        with self.path.open("rb") as file:
            if not file.seek(0, 2):
                return False
            file.seek(-1, 2)
            return file.read() != b"\n"

"""Whether the code that a model can run here is the code that a recorded release ran, function by function.

What is recorded of a release are its files, their pieces by digest (`autopack.trust.source_file`), and by **root** (a
class, or an entry of a table) the pieces that can be run from there. A file with the same bytes is not even parsed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import transformers

from autopack.trust.data import content_of, load
from autopack.trust.functions import matters
from autopack.trust.source_file import SourceFile, digest

_PREFIX = "transformers."
_HERE = Path(str(transformers.__file__)).parent


class Content:
    """The code of one recorded release."""

    def __init__(self, data: dict[str, Any]):
        self.release: str = data["with"]["transformers"]
        self._files: dict[str, str] = data["files"]
        self._pieces: dict[str, str] = data["pieces"]
        self._modules = list(self._files)
        self._parts: list[tuple[int, str]] = data["parts"]
        self._roots: dict[str, list[int]] = data["roots"]
        self._found: dict[frozenset[str], str | None] = {}

    @classmethod
    def of(cls, release: str) -> Content:
        """What the package carries of a release."""
        return cls(load(content_of(release)))

    @cached_property
    def tables(self) -> frozenset[str]:
        """The tables that the release has."""
        return frozenset(name.partition(" ")[0] for name in self._roots if " " in name)

    def knows(self, root: str) -> bool:
        """Whether it is recorded what can be run from a root."""
        return root in self._roots

    def reaches(self, roots: Iterable[str], module: str, piece: str) -> bool:
        """Whether a piece is among what can be run from some roots."""
        wanted = self._wanted(roots).get(module.removeprefix(_PREFIX))
        names = self._digests(module.removeprefix(_PREFIX)) if wanted else {}
        return wanted is not None and any(n == piece for number, n in enumerate(names) if wanted >> number & 1)

    def why_other(self, roots: Iterable[str]) -> str | None:
        """What of the code that can be run from roots is another one here; None where all of it is the same."""
        asked = frozenset(roots)
        if asked not in self._found:
            self._found[asked] = self._compare(self._wanted(asked))
        return self._found[asked]

    def _wanted(self, roots: Iterable[str]) -> dict[str, int]:
        """By module, the numbers of its pieces as the bits of one number."""
        found: dict[str, int] = {}
        for part in {part for root in roots for part in self._roots[root]}:
            number, bits = self._parts[part]
            module = self._modules[number]
            found[module] = found.get(module, 0) | int(bits, 16)
        return found

    def _compare(self, wanted: dict[str, int]) -> str | None:
        changed = [module for module in wanted if file_digest(_PREFIX + module) != self._files[module]]
        # What is parsed soonest comes first: one difference is enough.
        for module in sorted(changed, key=lambda module: _size(_PREFIX + module)):
            source = source_of(_PREFIX + module)
            for number, (piece, known) in enumerate(self._digests(module).items()):
                if wanted[module] >> number & 1 and (source is None or source.digest(piece) != known):
                    return self._told(module, piece, source)
            if source is not None and (added := self._added(module, wanted[module], source)) is not None:
                return f"{added} of {_PREFIX}{module} has not been measured ({self.release})"
        return None

    def _added(self, module: str, wanted: int, source: SourceFile) -> str | None:
        """The first function that a class has here and had not when it was recorded, and that may be run."""
        known = self._digests(module)
        for number, piece in enumerate(known):
            cls = piece.removesuffix("()")
            for function in source.functions(cls) if wanted >> number & 1 and source.class_named(cls) else ():
                if f"{cls}.{function}" not in known and matters(_PREFIX + module, cls, function):
                    return f"{cls}.{function}"
        return None

    def _digests(self, module: str) -> dict[str, str]:
        """The digests of the pieces of a module, in the order of their numbers."""
        return dict(_pair(text) for text in self._pieces[module].split(" "))

    def _told(self, module: str, piece: str, source: SourceFile | None) -> str:
        if source is None:
            return f"{_PREFIX}{module} is missing, of which {self.release} has {piece or 'statements'}"
        if source.digest(piece) is None:
            return f"{piece} of {_PREFIX}{module} is missing, which was measured ({self.release})"
        return f"{piece or 'a statement'} of {_PREFIX}{module} is not the one that was measured ({self.release})"


def _pair(text: str) -> tuple[str, str]:
    name, _, known = text.rpartition(":")
    return name, known


@cache
def path_of(module: str) -> Path | None:
    """The file of a module of transformers, whether or not it is loaded; None where there is none."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        return Path(loaded) if loaded.endswith(".py") and os.path.exists(loaded) else None
    base = _HERE.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


def _size(module: str) -> int:
    path = path_of(module)
    return 0 if path is None else path.stat().st_size


@cache
def file_digest(module: str) -> str | None:
    """The digest of the bytes of a module's file; None where there is no file."""
    path = path_of(module)
    return None if path is None else digest(path.read_bytes())


@cache
def source_of(module: str) -> SourceFile | None:
    """The pieces of a module; None where it has no source."""
    path = path_of(module)
    return None if path is None else SourceFile.read(module, path)

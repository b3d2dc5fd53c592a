"""The parsed matrix.toml: the single list of what autopack is tested against."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMPAT = Path(__file__).resolve().parent
ROOT = COMPAT.parent
MATRIX = COMPAT / "matrix.toml"
RESULTS = COMPAT / "results"
MODES = ("eager", "sdpa", "flash", "flex")
"""Attention implementations that compat/cells.py can measure, in the order in which results name
them."""


class CompatError(Exception):
    """The matrix, an environment or a recorded result is not as it has to be."""


@dataclass(frozen=True)
class Release:
    """One release of transformers: the packages that go with it, and whether `.ci/run` runs it."""

    transformers: str
    tokenizers: str
    hub: str
    python: str
    ci: bool = False

    @property
    def pins(self) -> list[str]:
        """What pip installs for it."""
        return [
            f"transformers=={self.transformers}",
            f"tokenizers=={self.tokenizers}",
            f"huggingface-hub=={self.hub}",
        ]

    @property
    def minor(self) -> str:
        """The line that it is the last patch of, such as 4.57."""
        return ".".join(self.transformers.split(".")[:2])


@dataclass(frozen=True)
class Line:
    """One version of torch with a minor version of Python, and the newest transformers that both
    allow."""

    torch: str
    python: str
    transformers: str

    @property
    def name(self) -> str:
        """What records name it by."""
        return f"{self.torch}, Python {self.python}"


@dataclass(frozen=True)
class Selection:
    """Which cells are run: tasks, modes, and model types, of which None stands for all."""

    tasks: tuple[str, ...]
    modes: tuple[str, ...]
    types: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Matrix:
    """The parsed matrix.toml."""

    torch: str
    tasks: tuple[str, ...]
    modes: tuple[str, ...]
    deep: tuple[str, ...]
    ci: Selection
    releases: tuple[Release, ...]
    support: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[Line, ...] = ()
    line_types: tuple[str, ...] = ()

    def select(self, names: Iterable[str]) -> list[Release]:
        """The listed releases with these names, full (4.57.6) or of a line (4.57), in the order of
        the matrix."""
        wanted = list(names)
        listed = {
            name for release in self.releases for name in (release.transformers, release.minor)
        }
        if unknown := [name for name in wanted if name not in listed]:
            raise CompatError(
                f"no transformers release {', '.join(unknown)} in {MATRIX.name}; it lists "
                f"{', '.join(release.transformers for release in self.releases)}. Choose one of "
                "those, or add a line."
            )
        return [
            release
            for release in self.releases
            if {release.transformers, release.minor} & set(wanted)
        ]


def number(version: str) -> tuple[int, ...]:
    """A version as something that compares."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


def load_matrix() -> Matrix:
    """Parse the file; a key that a section does not have is an error, as one that it lacks is."""
    data = tomllib.loads(MATRIX.read_text(encoding="utf-8"))
    ci, torches = data.pop("ci"), data.pop("torches")
    modes = tuple(data.pop("modes"))
    return Matrix(
        torch=data.pop("torch"),
        modes=modes,
        ci=Selection(tuple(ci["tasks"]), modes, tuple(ci["types"])),
        releases=tuple(Release(name, **entry) for name, entry in data.pop("releases").items()),
        support=data.pop("support"),
        lines=tuple(Line(**entry) for entry in torches["lines"]),
        line_types=tuple(torches["types"]),
        **{name: tuple(value) for name, value in data.items()},
    )

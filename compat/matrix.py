"""The parsed matrix.toml: the single list of what autopack is tested against."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMPAT = Path(__file__).resolve().parent
ROOT = COMPAT.parent
MATRIX = COMPAT / "matrix.toml"
MODES = ("eager", "sdpa", "flash", "flex")
"""Attention implementations that compat/cells.py can measure, in the order in which results name them."""


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
    """One version of torch with a minor version of Python, and the newest transformers that both allow."""

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
        """The listed releases with these names, full (4.57.6) or of a line (4.57), in the order of the matrix."""
        wanted = list(names)
        listed = {name for release in self.releases for name in (release.transformers, release.minor)}
        if unknown := [name for name in wanted if name not in listed]:
            raise CompatError(
                f"no transformers release {', '.join(unknown)} in {MATRIX.name}; it lists "
                f"{', '.join(release.transformers for release in self.releases)}. Choose one of those, or add a line."
            )
        return [release for release in self.releases if {release.transformers, release.minor} & set(wanted)]


def number(version: str) -> tuple[int, ...]:
    """A version as something that compares."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


def load_matrix(path: Path = MATRIX) -> Matrix:
    """Parse and check a matrix file; unknown or missing keys are errors that name the section."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    top = {"torch": str, "tasks": list, "modes": list, "deep": list, "ci": dict, "support": dict, "releases": dict}
    top["torches"] = dict
    _check_keys(data, top, required=set(top), where=path.name)
    _check_keys(data["ci"], {"tasks": list, "types": list}, required={"tasks", "types"}, where=f"{path.name}, [ci]")
    if unknown := sorted(set(data["modes"]).difference(MODES)):
        raise CompatError(f"{path.name}: modes names {', '.join(unknown)}; known are {', '.join(MODES)}.")
    if unknown := sorted(set(data["ci"]["tasks"]).difference(data["tasks"])):
        raise CompatError(f"{path.name}, [ci]: tasks names {', '.join(unknown)}, which is not among `tasks`.")
    releases = []
    fields = {"tokenizers": str, "hub": str, "python": str, "ci": bool}
    for name, entry in data["releases"].items():
        where = f"{path.name}, release {name}"
        _check_keys(entry, fields, required=set(fields) - {"ci"}, where=where)
        python_in_range(entry["python"], (3, 10))
        releases.append(Release(name, **entry))
    if not releases:
        raise CompatError(f"{path.name} lists no release.")
    lines = [release.minor for release in releases]
    if twice := sorted({line for line in lines if lines.count(line) > 1}):
        raise CompatError(f"{path.name} lists two releases of {', '.join(twice)}; the last patch is enough.")
    if releases != sorted(releases, key=lambda release: number(release.transformers)):
        raise CompatError(f"{path.name}: the releases have to ascend.")
    torches, listed = data["torches"], {release.transformers for release in releases}
    where = f"{path.name}, [torches]"
    _check_keys(torches, {"types": list, "lines": list}, required={"types", "lines"}, where=where)
    for entry in torches["lines"]:
        names = {"torch": str, "python": str, "transformers": str}
        _check_keys(entry, names, required=set(names), where=f"{where}, a line")
        if entry["transformers"] not in listed:
            raise CompatError(f"{where}: transformers {entry['transformers']} is not among the releases.")
    modes = tuple(data["modes"])
    return Matrix(
        torch=data["torch"],
        tasks=tuple(data["tasks"]),
        modes=modes,
        deep=tuple(data["deep"]),
        ci=Selection(tuple(data["ci"]["tasks"]), modes, tuple(data["ci"]["types"])),
        releases=tuple(releases),
        support=data["support"],
        lines=tuple(Line(**entry) for entry in torches["lines"]),
        line_types=tuple(torches["types"]),
    )


def _check_keys(section: Mapping[str, Any], types: Mapping[str, type], required: set[str], where: str) -> None:
    if missing := sorted(required.difference(section)):
        raise CompatError(f"{where} lacks {', '.join(missing)}.")
    for key, value in section.items():
        if key not in types:
            raise CompatError(f"{where}: unknown key {key!r}; known are {', '.join(types)}.")
        if not isinstance(value, types[key]):
            raise CompatError(f"{where}: {key} has to be a {types[key].__name__}, found {value!r}.")


def python_in_range(spec: str, found: tuple[int, int]) -> bool:
    """Whether a Python `(major, minor)` satisfies a bound such as ``>=3.10,<3.14``."""
    for bound in spec.split(","):
        text = bound.strip()
        operator, limit_text = (text[:2], text[2:]) if text.startswith(">=") else (text[:1], text[1:])
        parts = limit_text.split(".")
        if operator not in (">=", "<") or len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise CompatError(f"cannot read the Python bound {bound!r} in {spec!r}; write it as '>=3.10,<3.14'.")
        limit = (int(parts[0]), int(parts[1]))
        if (found < limit) if operator == ">=" else (found >= limit):
            return False
    return True

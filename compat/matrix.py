"""The parsed matrix.toml: the single list of what autopack is tested against."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMPAT = Path(__file__).resolve().parent
ROOT = COMPAT.parent
MATRIX = COMPAT / "matrix.toml"


class CompatError(Exception):
    """The matrix, an environment or a recorded result is not as it has to be."""


@dataclass(frozen=True)
class Version:
    """One transformers version: what its environment holds, and which model types or modes it lacks."""

    transformers: str
    pins: tuple[str, ...]
    python: str
    absent: tuple[str, ...] = ()
    ci: bool = False


@dataclass(frozen=True)
class Matrix:
    """The parsed matrix.toml."""

    torch: str
    pins: tuple[str, ...]
    tools: tuple[str, ...]
    models: tuple[str, ...]
    modes: tuple[str, ...]
    versions: tuple[Version, ...]
    planned: tuple[tuple[str, str], ...] = ()

    def cells_of(self, version: Version) -> list[str]:
        """What is tested with this version, each as ``model type/mode``."""
        present = [model for model in self.models if model not in version.absent]
        cells = [f"{model}/{mode}" for model in present for mode in self.modes]
        return [cell for cell in cells if cell not in version.absent]

    def nearest(self, transformers: str) -> Version:
        """The newest listed version that is not newer than this one; the oldest one where all are newer."""
        older = [version for version in self.versions if _number(version.transformers) <= _number(transformers)]
        return older[-1] if older else self.versions[0]

    def requirements(self, version: Version) -> list[str]:
        """Everything that pip is asked for, torch first."""
        exact = [f"torch=={self.torch}", f"transformers=={version.transformers}"]
        return [*exact, *version.pins, *self.pins, *self.tools]

    def select(self, names: Iterable[str]) -> list[Version]:
        """The listed versions with these names, in the order of the matrix."""
        wanted = set(names)
        listed = [version.transformers for version in self.versions]
        if unknown := sorted(wanted.difference(listed)):
            raise CompatError(
                f"no transformers version {', '.join(unknown)} in {MATRIX.name}; it lists {', '.join(listed)}. "
                "Choose one of those, or add a [[version]] section."
            )
        return [version for version in self.versions if version.transformers in wanted]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


def load_matrix(path: Path = MATRIX) -> Matrix:
    """Parses and checks a matrix file; unknown or missing keys are errors that name the section."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    top = {"torch": str, "pins": list, "tools": list, "models": list, "modes": list, "version": list, "planned": list}
    _check_keys(data, top, required=set(top) - {"planned"}, where=path.name)
    sections = []
    fields = {"transformers": str, "pins": list, "python": str, "absent": list, "ci": bool}
    for number, section in enumerate(data["version"], start=1):
        where = f"{path.name}, [[version]] number {number}"
        _check_keys(section, fields, required={"transformers", "pins", "python"}, where=where)
        known = {*data["models"], *(f"{model}/{mode}" for model in data["models"] for mode in data["modes"])}
        if unknown := sorted(set(section.get("absent", ())) - known):
            raise CompatError(f"{where}: absent names {', '.join(unknown)}, which `models` and `modes` do not list.")
        python_in_range(section["python"], (3, 10))
        sections.append(
            Version(
                transformers=section["transformers"],
                pins=tuple(section["pins"]),
                python=section["python"],
                absent=tuple(section.get("absent", ())),
                ci=section.get("ci", False),
            )
        )
    names = [section.transformers for section in sections]
    if len(set(names)) != len(names):
        raise CompatError(f"{path.name} lists a transformers version twice: {', '.join(names)}.")
    planned = []
    for number, section in enumerate(data.get("planned", ()), start=1):
        where = f"{path.name}, [[planned]] number {number}"
        _check_keys(section, {"transformers": str, "reason": str}, required={"transformers", "reason"}, where=where)
        planned.append((section["transformers"], section["reason"]))
    return Matrix(
        torch=data["torch"],
        pins=tuple(data["pins"]),
        tools=tuple(data["tools"]),
        models=tuple(data["models"]),
        modes=tuple(data["modes"]),
        versions=tuple(sections),
        planned=tuple(planned),
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
        operator, number = (text[:2], text[2:]) if text.startswith(">=") else (text[:1], text[1:])
        parts = number.split(".")
        if operator not in (">=", "<") or len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise CompatError(f"cannot read the Python bound {bound!r} in {spec!r}; write it as '>=3.10,<3.14'.")
        limit = (int(parts[0]), int(parts[1]))
        if (found < limit) if operator == ">=" else (found >= limit):
            return False
    return True

"""``autopack families``: which architectures are served, in which way on which device, and what was measured."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopack.errors import AutopackError

if TYPE_CHECKING:
    from autopack.architectures import Family

MEASURED = Path(__file__).parents[1] / "measured.json"
"""What `python -m compat.exactness` recorded: by model type, the worst error of each backend, or why it is refused."""

ATTENTION = {
    "CPU": "sdpa or eager, document by document",
    "CUDA": "varlen, flash or flex in one kernel, else as on CPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``autopack families``."""
    parser.description = (
        "List the families of architectures that autopack serves: their model types, their mixers, the path that "
        "attention and mixers take on each device, and the errors of the released leak test. Other models with "
        "attention of the same structure are served too, after an audit on enable."
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="show only these model types, as in config.model_type")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the families, or what is known of the model types that were named; 0, or 1 if one is not served."""
    from autopack.registry import families

    measured = load()
    found = [describe(family, measured["types"]) for family in families()]
    if args.types:
        rows = [_of_type(name, found, measured["types"]) for name in args.types]
        print(json.dumps(rows, indent=1) if args.json else "\n".join(_line(row) for row in rows))
        return 0 if all(row["family"] for row in rows) else 1
    if args.json:
        print(json.dumps({**measured["with"], "families": found}, indent=1))
    else:
        served = sum(len(family["model_types"]) for family in found)
        where = ", ".join(f"{name} {version}" for name, version in measured["with"].items())
        print("\n\n".join(_text(family) for family in found if family["model_types"]))
        print(
            f"\n{served} model types. Errors are those of logits, packed against alone, relative to their standard "
            f"deviation,\nthe worst over all call modes of `autopack audit`: {where}."
        )
    return 0


def describe(family: Family, measured: dict[str, Any]) -> dict[str, Any]:
    """One family as plain data."""
    ways: dict[Any, list[str]] = {}
    for name, way in family.mixers.items():
        ways.setdefault(way, []).append(name)
    mixers = [{"classes": sorted(names), "way": str(way), "paths": way.paths()} for way, names in ways.items()]
    return {
        "name": family.name,
        "path": family.path,
        "model_types": sorted(family.model_types),
        "mixers": mixers,
        "attention": ATTENTION if family.attends else None,
        "measured": {name: measured[name] for name in sorted(family.model_types) if name in measured},
        "refused": dict(family.refused_types),
    }


def _of_type(name: str, found: list[dict[str, Any]], measured: dict[str, Any]) -> dict[str, Any]:
    family = next((f for f in found if name in f["model_types"]), None)
    refused = next((f["refused"][name] for f in found if name in f["refused"]), None)
    row = {"type": name, "family": family and family["name"], "path": family and family["path"]}
    return {**row, "measured": measured.get(name), "refused": refused}


def _line(row: dict[str, Any]) -> str:
    if row["family"]:
        return f"{row['type']}: {row['path']} (family {row['family']}); {_errors(row['measured'])}"
    if row["refused"]:
        return f"{row['type']}: refused, since {row['refused']}"
    known = row["measured"] or {}
    reason = known.get("refused") or "no family has it; enable() serves it if its structure allows, after an audit"
    return f"{row['type']}: {reason}"


def _errors(measured: dict[str, Any] | None) -> str:
    errors = (measured or {}).get("errors")
    if not errors:
        return "not measured by its own name"
    return "exact: " + ", ".join(f"{backend} {_short(error)}" for backend, error in errors.items())


def _short(error: float) -> str:
    return f"{error:.0e}" if error else "0"


def _text(family: dict[str, Any]) -> str:
    lines = [f"{family['name']}: {family['path']}"]
    lines += textwrap.wrap(" ".join(family["model_types"]), 112, initial_indent="  ", subsequent_indent="  ")
    if family["attention"]:
        lines.append("  attention")
        lines += [f"    {device:<5} {path}" for device, path in family["attention"].items()]
    for mixers in family["mixers"]:
        lines += textwrap.wrap(", ".join(mixers["classes"]), 112, initial_indent="  ", subsequent_indent="  ")
        for device, path in mixers["paths"].items():
            lines += textwrap.wrap(path, 108, initial_indent=f"    {device:<5} ", subsequent_indent=" " * 10)
    exact = {name: max(found["errors"].values()) for name, found in family["measured"].items() if found.get("errors")}
    if exact:
        worst = max(exact, key=lambda name: exact[name])
        types = "1 type" if len(exact) == 1 else f"{len(exact)} types"
        lines.append(f"  measured: {types} exact, largest error {_short(exact[worst])} ({worst})")
    return "\n".join(lines)


def load() -> dict[str, Any]:
    """The recorded measurements: `with`, the versions that they were made with, and `types`."""
    try:
        return dict(json.loads(MEASURED.read_text()))
    except FileNotFoundError as error:
        raise AutopackError(f"{MEASURED} is missing, so this installation of autopack is not complete") from error

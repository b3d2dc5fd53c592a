"""``autopack families``: which architectures are served, and in which way on which device."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from autopack.errors import did_you_mean

if TYPE_CHECKING:
    from autopack.family import Family

ATTENTION = {
    "CPU": "sdpa or eager, document by document",
    "CUDA": "varlen, flash or flex in one kernel, else as on CPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the families of architectures that autopack serves: their model types, their mixers, the path that "
        "attention and mixers take on each device. Other models with attention of the same structure are served too."
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="show only these model types, as in config.model_type")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the families, or what is known of the model types that were named; 0, or 1 if one is not served."""
    from autopack.registry import families

    found = [describe(family) for family in families()]
    if args.types:
        rows = [of_type(name, found) for name in args.types]
        print(json.dumps(rows, indent=1) if args.json else "\n".join(map(_type_text, rows)))
        return 0 if all(row["served"] for row in rows) else 1
    if args.json:
        print(json.dumps({"families": found}, indent=1))
        return 0
    refused = {name: reason for family in found for name, reason in family["refused"].items()}
    served = sum(len(family["model_types"]) for family in found)
    print("\n\n".join(_family_text(family) for family in found if family["model_types"]))
    print("\nrefused", *(_wrapped(f"  {name:<20} ", refused[name], 118) for name in sorted(refused)), sep="\n")
    print(f"\n{served} model types. What was measured of each: docs/reliability.md")
    return 0


def describe(family: Family) -> dict[str, Any]:
    """One family as plain data."""
    ways: dict[Any, list[str]] = {}
    for name, way in family.mixers.items():
        ways.setdefault(way, []).append(name)
    return {
        "name": family.name,
        "path": family.how,
        "model_types": sorted(family.model_types),
        "mixers": [{"classes": sorted(names), "way": str(way), "paths": way.how()} for way, names in ways.items()],
        "attention": ATTENTION if family.attends else None,
        "refused": dict(family.refused_types),
    }


def of_type(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return facts on one model type: its family and path, or the reason why it is refused."""
    family = next((f for f in found if name in f["model_types"]), None)
    row = {"type": name, "served": family is not None, "family": None, "path": None, "refused": None}
    if family is not None:
        return {**row, "family": family["name"], "path": family["path"]}
    refused = next((f["refused"][name] for f in found if name in f["refused"]), None)
    return {**row, **({"refused": refused} if refused else _asked_of_a_tiny_model(name))}


def _asked_of_a_tiny_model(name: str) -> dict[str, Any]:
    """Return the registry's answer for a type that no family lists, from the structure of transformers' model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from autopack import registry, tiny

    if name not in CONFIG_MAPPING:
        hint = "remote code of this type is served where its structure allows"
        meant = did_you_mean(name, list(CONFIG_MAPPING), f"; {hint}")
        return {"refused": f"transformers {transformers.__version__} has no such type{meant}"}
    task = next((task for task in tiny.TASKS if name in tiny.types_for(task)), None)
    if task is None:
        return {"refused": "transformers has no language model of this type"}
    try:
        model = tiny.build(name, task=task)
    except tiny.CannotBuild as error:
        return {"refused": f"no family lists it, and its structure could not be looked at: {error.reason}"}
    family, reason = registry.look_up(model)
    served = {"served": True, "path": f"{family.how}, by its structure"}
    return served if reason is None else {"refused": reason}


def _type_text(row: dict[str, Any]) -> str:
    by = f" (family {row['family']})" if row["family"] else ""
    said = f"{row['path']}{by}" if row["served"] else f"refused: {row['refused']}"
    return _wrapped(f"{row['type']:<20} ", said, 116)


def _family_text(family: dict[str, Any]) -> str:
    lines = [f"{family['name']}: {family['path']}", _wrapped("  ", " ".join(family["model_types"]))]
    if family["attention"]:
        lines += ["  attention", *_path_lines(family["attention"])]
    for mixers in family["mixers"]:
        lines += [_wrapped("  ", ", ".join(mixers["classes"])), *_path_lines(mixers["paths"])]
    return "\n".join(lines)


def _path_lines(paths: dict[str, str]) -> list[str]:
    return [_wrapped(f"    {device:<5} ", path, 108) for device, path in paths.items()]


def _wrapped(name: str, text: str, width: int = 112) -> str:
    """A text behind its name, in lines that are all indented as far as the name reaches."""
    after = " " * len(name)
    return textwrap.fill(text, width, initial_indent=name, subsequent_indent=after, break_on_hyphens=False)

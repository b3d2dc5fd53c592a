"""``autopack families``: which architectures are served, in which way on which device, and what was measured."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from autopack.errors import did_you_mean
from autopack.trust.data import load

if TYPE_CHECKING:
    from autopack.family import Family

ATTENTION = {
    "CPU": "sdpa or eager, document by document",
    "CUDA": "varlen, flash or flex in one kernel, else as on CPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    found = [describe(family, measured["tasks"]) for family in families()]
    if args.types:
        rows = [of_type(name, found, measured["tasks"]) for name in args.types]
        print(json.dumps(rows, indent=1) if args.json else "\n".join(map(_type_text, rows)))
        return 0 if all(row["served"] for row in rows) else 1
    if args.json:
        print(json.dumps({**measured["with"], "families": found}, indent=1))
        return 0
    refused = {name: reason for family in found for name, reason in family["refused"].items()}
    served = sum(len(family["model_types"]) for family in found)
    where = ", ".join(f"{name} {version}" for name, version in measured["with"].items())
    print("\n\n".join(_family_text(family) for family in found if family["model_types"]))
    print("\nrefused", *(_wrapped(f"  {name:<20} ", refused[name], 118) for name in sorted(refused)), sep="\n")
    print(
        f"\n{served} model types. Errors are those of logits, packed against alone, relative to their standard "
        f"deviation,\nthe worst over all call modes of `autopack audit`: {where}."
    )
    return 0


def describe(family: Family, tasks: dict[str, Any]) -> dict[str, Any]:
    """One family as plain data; `tasks` and `measured` are by task and model type."""
    ways: dict[Any, list[str]] = {}
    for name, way in family.mixers.items():
        ways.setdefault(way, []).append(name)
    types = sorted(family.model_types)
    return {
        "name": family.name,
        "path": family.how,
        "model_types": types,
        "mixers": [{"classes": sorted(names), "way": str(way), "paths": way.how()} for way, names in ways.items()],
        "attention": ATTENTION if family.attends else None,
        "measured": {task: {name: known[name] for name in types if name in known} for task, known in tasks.items()},
        "refused": dict(family.refused_types),
    }


def of_type(name: str, found: list[dict[str, Any]], tasks: dict[str, Any]) -> dict[str, Any]:
    """What is known of one model type: its family and path, or why it is refused, and what was measured by task."""
    family = next((f for f in found if name in f["model_types"]), None)
    row = {"type": name, "served": family is not None, "family": None, "path": None, "refused": None}
    if family is not None:
        row |= {"family": family["name"], "path": family["path"]}
    else:
        refused = next((f["refused"][name] for f in found if name in f["refused"]), None)
        row |= {"refused": refused} if refused else _asked_of_a_tiny_model(name)
    return {**row, "measured": {task: known[name] for task, known in tasks.items() if name in known}}


def _asked_of_a_tiny_model(name: str) -> dict[str, Any]:
    """What the registry says of a type that no family lists, by the structure of the model that transformers has."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from autopack import registry, tiny

    if name not in CONFIG_MAPPING:
        hint = "remote code of this type is served where its structure allows, after an audit on enable"
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
    served = {"served": True, "path": f"{family.how}, by its structure and after an audit on enable"}
    return served if reason is None else {"refused": reason}


def _type_text(row: dict[str, Any]) -> str:
    by = f" (family {row['family']})" if row["family"] else ""
    lines = [f"{row['path']}{by}" if row["served"] else f"refused: {row['refused']}"]
    if row["served"]:
        measured = {task: known["errors"].items() for task, known in row["measured"].items() if known.get("errors")}
        for task, errors in measured.items():
            lines.append(f"{task}: exact, {', '.join(f'{backend} {_short(error)}' for backend, error in errors)}")
        lines += [] if measured else ["not measured by its own name"]
    return "\n".join(_wrapped(f"{'' if number else row['type']:<20} ", line, 116) for number, line in enumerate(lines))


def _family_text(family: dict[str, Any]) -> str:
    lines = [f"{family['name']}: {family['path']}", _wrapped("  ", " ".join(family["model_types"]))]
    if family["attention"]:
        lines += ["  attention", *_path_lines(family["attention"])]
    for mixers in family["mixers"]:
        lines += [_wrapped("  ", ", ".join(mixers["classes"])), *_path_lines(mixers["paths"])]
    for task, known in family["measured"].items():
        exact = {name: max(found["errors"].values()) for name, found in known.items() if found.get("errors")}
        if exact:
            worst = max(exact, key=lambda name: exact[name])
            types = "1 type" if len(exact) == 1 else f"{len(exact)} types"
            lines.append(f"  measured, {task}: {types} exact, largest error {_short(exact[worst])} ({worst})")
    return "\n".join(lines)


def _path_lines(paths: dict[str, str]) -> list[str]:
    return [_wrapped(f"    {device:<5} ", path, 108) for device, path in paths.items()]


def _wrapped(name: str, text: str, width: int = 112) -> str:
    """A text behind its name, in lines that are all indented as far as the name reaches."""
    after = " " * len(name)
    return textwrap.fill(text, width, initial_indent=name, subsequent_indent=after, break_on_hyphens=False)


def _short(error: float) -> str:
    return f"{error:.0e}" if error else "0"

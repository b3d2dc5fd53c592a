"""``autopack families``: which architectures are served, and in which way on which device."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from autopack.commands.models import task_for
from autopack.errors import did_you_mean

if TYPE_CHECKING:
    from autopack.family import Family


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the families of architectures that autopack serves: the path of each, and its model types; --json adds "
        "the mixers. Other models with attention of the same structure are served too."
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="show only these model types, as in config.model_type")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the families, or what is known of the model types that were named; 0, or 1 if one is not served."""
    from autopack.registry import families

    found, rows = families(), [of_type(name) for name in args.types]
    if args.json:
        print(json.dumps(rows or {"families": [describe(family) for family in found]}, indent=1))
    elif rows:
        for row in rows:
            by = f" (family {row['family']})" if row["family"] else ""
            _print(row["type"], f"{row['path']}{by}" if row["served"] else f"refused: {row['refused']}")
    else:
        for family in found:
            print(f"{family.name}: {family.how}")
            _print("", " ".join(sorted(family.model_types)), indent=2)
        print("refused")
        for name, reason in sorted(pair for family in found for pair in family.refused_types.items()):
            _print(f"  {name}", reason)
        served = sum(len(family.model_types) for family in found)
        print(f"{served} model types. What was measured of each: docs/reliability.md")
    return 0 if all(row["served"] for row in rows) else 1


def _print(name: str, text: str, indent: int = 21) -> None:
    """Print a text behind a name, in lines that are indented alike."""
    first, others = f"{name:<{indent - 1}} ", " " * indent
    print(textwrap.fill(text, 118, initial_indent=first, subsequent_indent=others, break_on_hyphens=False))


def describe(family: Family) -> dict[str, Any]:
    """Return one family as plain data."""
    return {
        "name": family.name,
        "path": family.how,
        "model_types": sorted(family.model_types),
        "mixers": {name: type(way).__name__ for name, way in family.mixers.items()},
        "refused": dict(family.refused_types),
    }


def of_type(name: str) -> dict[str, Any]:
    """Return facts on one model type: its family and path, or the reason why it is refused."""
    from autopack.registry import families

    for family in families():
        if name in family.model_types:
            return _row(name, family.how, None, family.name)
        if name in family.refused_types:
            return _row(name, None, family.refused_types[name])
    return _row(name, *_asked_of_a_tiny_model(name))


def _row(name: str, path: str | None, refused: str | None, family: str | None = None) -> dict[str, Any]:
    return {"type": name, "served": refused is None, "family": family, "path": path, "refused": refused}


def _asked_of_a_tiny_model(name: str) -> tuple[str | None, str | None]:
    """Return the path of a type that no family lists, or why it is refused, by the structure of transformers' model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from autopack import registry, tiny

    if name not in CONFIG_MAPPING:
        hint = "remote code of this type is served where its structure allows"
        meant = did_you_mean(name, list(CONFIG_MAPPING), f"; {hint}")
        return None, f"transformers {transformers.__version__} has no such type{meant}"
    task = task_for(name)
    if task is None:
        return None, "transformers has no language model of this type"
    try:
        model = tiny.build(name, task=task)
    except tiny.CannotBuild as error:
        return None, f"no family lists it, and its structure could not be looked at: {error.reason}"
    family, reason = registry.look_up(model)
    return None if reason else f"{family.how}, by its structure", reason

"""List the architectures that are served, and how.

Names the path of each family and its model types; --json adds the mixers. Other models with
attention of the same structure are served too.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from autopack.errors import did_you_mean

if TYPE_CHECKING:
    from autopack.family import Family


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "types",
        nargs="*",
        metavar="TYPE",
        help="show only these model types, as in config.model_type",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print all families, or the facts on named types. Return 1 if a named type is not served."""
    from autopack.registry import families

    found, rows = families(), [of_type(name) for name in args.types]
    if args.json:
        print(json.dumps(rows or {"families": [describe(family) for family in found]}, indent=1))
    elif rows:
        known = [name for each in found for name in each.model_types]
        for row in rows:
            name = row["type"]
            said = {
                True: f"served: {row['path']} (family {row['family']})",
                False: f"refused: {row['refused']}",
                None: f"no family lists it{did_you_mean(name, known)}; try `autopack audit {name}`",
            }
            _print(f"{name}: {said[row['served']]}")
    else:
        for family in found:
            if family.model_types:
                _print(f"{family.name}: {family.how}")
                _print("  " + " ".join(sorted(family.model_types)))
        print("refused")
        refused = {name: why for family in found for name, why in family.refused_types.items()}
        for name in sorted(refused):
            _print(f"  {name}: {refused[name]}")
        served = sum(len(family.model_types) for family in found)
        print(f"{served} model types. What was measured of each: docs/reliability.md")
    return 0 if all(row["served"] for row in rows) else 1


def _print(text: str) -> None:
    """Print a text, wrapped and indented from the second line on."""
    print(textwrap.fill(text, 118, subsequent_indent="    ", break_on_hyphens=False))


def describe(family: Family) -> dict[str, Any]:
    """Return a family's name, path, model types, mixers and refused types as plain data."""
    return {
        "name": family.name,
        "path": family.how,
        "model_types": sorted(family.model_types),
        "mixers": {name: type(way).__name__ for name, way in family.mixers.items()},
        "refused": dict(family.refused_types),
    }


def of_type(name: str) -> dict[str, Any]:
    """Return facts on one model type: its family and path if served, or why it is refused.

    `served` is None for a type that no family lists: its models' structure decides.
    """
    from autopack.registry import families

    row = {"type": name, **dict.fromkeys(("served", "family", "path", "refused"))}
    for family in families():
        if name in family.model_types:
            return row | {"served": True, "family": family.name, "path": family.how}
        if name in family.refused_types:
            return row | {"served": False, "refused": family.refused_types[name]}
    return row

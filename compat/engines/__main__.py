"""Train tiny models on several processes (gloo, CPU) by every engine, and compare with one process of stock code.

    python -m compat.engines                                  every engine with its types
    python -m compat.engines --engines fsdp2 zero3            some of them
    python -m compat.engines --types llama xlnet              other types; `xlnet:sequence-classification` a head
    python -m compat.engines --json compat/results/engines.json

A cell is an engine and a type: three optimizer steps on packed rows of unequal numbers of documents, the last after
a checkpoint has been saved and loaded into a new model. Loss, gradients and parameters after each step have to be those
of a plain model that gets each document alone. The exit status is 1 where a cell is neither exact nor refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from compat.engines.cells import DYING, ENGINE_NAMES, types_of
from compat.engines.start import run

GOOD = ("exact", "refused", "ended", "absent", "no stock")


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are asked for; 1 where one is wrong, crashes or hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINE_NAMES, default=ENGINE_NAMES, metavar="NAME")
    parser.add_argument("--types", nargs="+", help="model types (default: those that matter to each engine)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a rank that waits has hung")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all verdicts there")
    asked = parser.parse_args(arguments)
    cells = [
        f"{engine}/{kind}"
        for engine in asked.engines
        for kind in (types_of(engine) if engine in DYING else asked.types or types_of(engine))
    ]
    found: dict[str, dict[str, object]] = {}
    with tqdm(total=len(cells), file=sys.stderr, unit=" cells") as bar:
        for cell, verdict in run(cells, asked.timeout):
            found[cell] = verdict
            bar.update()
    if asked.json is not None:
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "accelerate")}
        whole = {"with": versions, "cells": {cell: found[cell] for cell in cells}}
        asked.json.write_text(json.dumps(whole, indent=1) + "\n")
    print_table(cells, found)
    return 0 if all(verdict["status"] in GOOD for verdict in found.values()) else 1


def print_table(cells: Iterable[str], found: dict[str, dict[str, object]]) -> None:
    """Print a line for each cell."""
    table = Table("engine", "type", "", "error or reason", box=None)
    for cell in cells:
        engine, _, kind = cell.partition("/")
        verdict = found[cell]
        error = verdict.get("error")
        said = f"{error:.1e}" if isinstance(error, float) else str(verdict.get("reason", ""))
        table.add_row(engine, kind, str(verdict["status"]), escape(said))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())

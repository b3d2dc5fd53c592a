"""Train tiny models on several processes (gloo, CPU) by every engine, and compare with one process
of stock code.

    python -m compat.engines                                  every engine with its types
    python -m compat.engines --engines fsdp2 zero3            some of them
    python -m compat.engines --types llama xlnet              other types; `xlnet:sequence-classification` a head
    python -m compat.engines --json compat/results/engines.json

A cell is an engine and a type: three optimizer steps on packed rows of unequal numbers of
documents, the last after a checkpoint has been saved and loaded into a new model. Loss, gradients
and parameters after each step have to be those of a plain model that gets each document alone. The
exit status is 1 where a cell is neither exact nor refused."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from compat.common import write_json
from compat.engines.cells import DYING, ENGINE_NAMES, types_of
from compat.engines.start import run

GOOD = ("exact", "refused", "ended", "absent", "no stock")


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are asked for; 1 where one is wrong, crashes or hangs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINE_NAMES, default=ENGINE_NAMES, metavar="NAME"
    )
    parser.add_argument(
        "--types", nargs="+", help="model types (default: those that matter to each engine)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds after which a rank that waits has hung"
    )
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
        versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
        write_json(asked.json, {"with": versions, "cells": {cell: found[cell] for cell in cells}})
    for cell in cells:
        verdict = found[cell]
        print(f"{cell:<50}{verdict['status']:<12}{verdict.get('error', verdict.get('reason', ''))}")
    return 0 if all(verdict["status"] in GOOD for verdict in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Run all types through interpreted kernels, and record what came out:

python -m compat.kernels --json compat/results/kernels.json      a quarter of an hour, on one core
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from compat.common import write_json
from compat.kernels import packages
from compat.kernels.cells import CELLS


def run(names: Sequence[str], short: bool = False) -> list[dict[str, Any]]:
    """What `compat.kernels.worker` finds for these types, in one process; `short`: with fewer
    tokens."""
    command = [sys.executable, "-m", "compat.kernels.worker", *names, *["--short"] * short]
    done = subprocess.run(
        command, env=packages.environ(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-3000:]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", default=list(CELLS), help="all if none is given")
    parser.add_argument(
        "--json",
        type=Path,
        help="where to write what was found; of named types beside what is there",
    )
    options = parser.parse_args()
    cells = {}
    for name in options.types:
        cells[name] = run([name])[0]
        print(
            f"{name}: logits {cells[name]['logits']:.1e}, gradients {cells[name]['gradients']:.1e}",
            flush=True,
        )
    if options.json is not None:
        found = {name: metadata.version(name) for name in ("torch", "transformers")}
        about = found | dict(pin.split("==") for pin in (*packages.PINS, *packages.SOURCES))
        if options.types != list(CELLS) and options.json.exists():
            present = json.loads(options.json.read_text(encoding="utf-8"))
            if present["with"] != about:
                parser.error(
                    f"{options.json} was recorded with {present['with']}: record all types anew"
                )
            cells = {
                name: cell for name, cell in (present["cells"] | cells).items() if name in CELLS
            }
        record = {"with": about, "cells": cells}
        write_json(options.json, record)
    return 0 if all(max(cell["logits"], cell["gradients"]) < 1e-5 for cell in cells.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Run all types through interpreted kernels:

python -m compat.kernels --record      a quarter of an hour, on one core
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from compat import study
from compat.kernels import packages
from compat.kernels.cells import CELLS
from compat.study import Study

EXACT = 1e-5
"""Relative, in float32: kernels add up the same numbers in another order. What was measured is
below 3e-6."""


def run(names: Sequence[str], *options: str) -> list[dict[str, Any]]:
    """What `compat.kernels.worker` finds for these types with its options, in one process."""
    command = [sys.executable, "-m", "compat.kernels.worker", *names, *options]
    done = subprocess.run(
        command, env=packages.environ(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-3000:]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("torch", "transformers")}
    return found | dict(pin.split("==") for pin in (*packages.PINS, *packages.SOURCES))


STUDY = Study(
    "kernels",
    str(__doc__),
    lambda: CELLS,
    lambda names, _: ((name, run([name])[0]) for name in names),
    lambda _, cell: None if max(cell["logits"], cell["gradients"]) < EXACT else "it is off",
    _versions,
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))

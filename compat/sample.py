"""Measure a random sample of the recorded cells anew, another one each time, and find those that
the record has wrong.

    python -m compat.run --sample 60               of the releases of .ci/run; the seed is printed
    python -m compat.run --sample 60 --seed S      the same sample again
    python -m compat.run --sample 200 --only 5.0 4.57.6

Results that are generated stay equal to themselves whatever the code does; this is what finds that
it does otherwise. A cell differs where its status, or what is left out of it, is not what is
recorded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

from compat import workers
from compat.environments import Environment
from compat.matrix import CompatError
from compat.tables import cells_of, load
from compat.words import REMARKS, Cell
from compat.workers import Unit

Drawn = list[tuple[Environment, list[Cell]]]


def draw(environments: Sequence[Environment], number: int, seed: str) -> Drawn:
    """About `number` recorded cells, as many of each release, but for absent ones, where nothing is
    measured.

    Raises `CompatError` where a release has no record.
    """
    drawn = []
    for place, environment in enumerate(environments):
        result = load(environment.release)
        if "cells" not in result:
            raise CompatError(
                f"transformers {environment.name} has no record of cells by the default call; "
                f"`python -m compat.run --only {environment.name}` makes it"
            )
        there = [cell for cell in cells_of(result) if cell["status"] != "absent"]
        wanted = number // len(environments) + (place < number % len(environments))
        chosen = random.Random(f"{seed} {environment.name}").sample(there, min(wanted, len(there)))
        drawn.append((environment, sorted(chosen, key=_unit)))
    return drawn


def differences(drawn: Drawn, jobs: int, limit: float) -> Iterator[str]:
    """Measure the cells that were drawn, and say in a line for each how it differs from its record,
    if it does."""

    def one(each: tuple[Environment, list[Cell]]) -> list[str]:
        environment, recorded = each
        units = [
            Unit(*unit, tuple(c["mode"] for c in cells)) for unit, cells in groupby(recorded, _unit)
        ]
        measured = list(workers.measure(environment, units, limit))
        found = {(_unit(cell), cell["mode"]): cell for cell in measured}
        pairs = [(cell, found[_unit(cell), cell["mode"]]) for cell in recorded]
        return [
            f"transformers {environment.name}: {now['type']}/{now['task']}/{now['mode']} is "
            f"recorded as {_said(cell)}, and is {_said(now)}"
            for cell, now in pairs
            if verdict(cell) != verdict(now)
        ]

    with ThreadPoolExecutor(jobs) as pool:
        for lines in pool.map(one, drawn):
            yield from lines


def verdict(cell: Cell) -> str:
    """What is compared of a cell: errors and the wording of reasons differ between machines, these
    do not."""
    # which is another one elsewhere
    left = [name for name in REMARKS if name in cell and name != "rounding"]
    return cell["status"] + (f", without {' and '.join(left)}" if left else "")


def _said(cell: Cell) -> str:
    reasons = [cell[name] for name in ("reason", *REMARKS) if name in cell]
    return verdict(cell) + (f" [{'; '.join(reasons)}]" if reasons else "")


def _unit(cell: dict[str, Any]) -> tuple[str, str]:
    return cell["task"], cell["type"]

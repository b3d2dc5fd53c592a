"""Measure which neighbouring libraries an enabled model lives with: the real packages, on a tiny
random model.

    python -m compat.neighbours                       all neighbours that are installed, printed
    python -m compat.neighbours --only peft liger     those whose name or what they do contains one of these
    python -m compat.neighbours --record              also recorded in compat/results/neighbours.json, with the table
    python -m compat.neighbours --json FILE           also written there
    python -m compat.neighbours --table               write docs/neighbours.md from the recorded results
    python -m compat.neighbours --check               fail where a result is bad or the table not that of the results

`pip install -e ".[neighbours]"` installs them. The verdicts are those of
compat/neighbours/measure.py: `LEAKS`, `other numbers` and `crash` are failures, for which the exit
status is 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compat.common import quietly, write_json
from compat.neighbours import adapters, liger, others, quantised, table
from compat.neighbours.measure import BAD, CannotRun, Door, Scenario, measure, measure_door

PLATFORM = ("torch", "transformers")


def scenarios() -> list[Scenario | Door]:
    """Everything that is measured, in the order of the table."""
    return [*liger.scenarios(), *adapters.scenarios(), *quantised.scenarios(), *others.scenarios()]


def chosen(names: Sequence[str]) -> list[Scenario | Door]:
    """Those whose neighbour or name contains one of these words; all where there are none."""
    return [
        each
        for each in scenarios()
        if not names
        or any(name.lower() in f"{each.neighbour} {each.what}".lower() for name in names)
    ]


def rows(wanted: Iterable[Scenario | Door]) -> list[dict[str, Any]]:
    """Measure them, one after the other: a row for each and each time at which the model is
    enabled."""
    found = []
    for each in tqdm(list(wanted), unit="scenario", file=sys.stderr):
        for order in each.orders if isinstance(each, Scenario) else (None,):
            about = {"neighbour": each.neighbour, "what": each.what}
            about |= {"enabled": order} if order else {}
            about |= {"note": each.note} if each.note else {}
            try:
                verdicts = _measured(each, order)
            except CannotRun as error:
                verdicts = {"cannot": str(error)}
            found.append({**about, **verdicts})
    return found


def _measured(each: Scenario | Door, order: str | None) -> dict[str, Any]:
    return measure_door(each) if isinstance(each, Door) else measure(each, str(order))


def bad(found: Iterable[dict[str, Any]]) -> list[str]:
    """What breaks autopack's promise, a line for each."""
    return [
        f"{row['neighbour']}, {row['what']}, enabled {row.get('enabled', 'as it is used')}: {form} "
        f"{verdict['status']} ({verdict.get('reason') or verdict['errors']})"
        for row in found
        for form in ("packed", "padded")
        if (verdict := row.get(form)) and verdict["status"] in BAD
    ]


def versions(found: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Of what the rows were measured with."""
    names = dict.fromkeys((*PLATFORM, *(row["neighbour"] for row in found)))
    installed = {
        metadata.name.lower().replace("_", "-"): metadata.version for metadata in _distributions()
    }
    return {name: installed.get(name, "not installed") for name in names}


def _distributions() -> list[metadata.PathDistribution]:
    return [each for each in metadata.distributions() if each.name]  # type: ignore[misc]


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; 1 where something is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="words of neighbours or what they do"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--record", action="store_true", help="record a run of all, and write the table"
    )
    parser.add_argument(
        "--table", action="store_true", help="write the table from the recorded results"
    )
    parser.add_argument(
        "--check", action="store_true", help="hold the table to the recorded results; runs nothing"
    )
    asked = parser.parse_args(arguments)
    if asked.table or asked.check:
        return table.check(bad) if asked.check else table.write()
    if asked.record and asked.only:
        parser.error("--record wants all neighbours: leave --only out, or use --json FILE")
    wanted = chosen(asked.only)
    if not wanted:
        known = ", ".join(dict.fromkeys(each.neighbour for each in scenarios()))
        parser.error(f"nothing is called {' or '.join(asked.only)}; there are {known}")
    with quietly():
        found = rows(wanted)
    result = {"with": versions(found), "rows": found}
    for path in [asked.json] * (asked.json is not None) + [table.RESULTS] * asked.record:
        write_json(path, result)
    if asked.record:
        table.write()
    print(table.of_rows(result))
    problems = bad(found)
    for problem in problems:
        print(f"FAILED {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a release of transformers that matrix.toml does not list yet changes for autopack."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from packaging.requirements import Requirement
from tqdm import tqdm

from compat import workers
from compat.environments import Environment, cache_directory
from compat.matrix import CompatError, Matrix, Release, Selection, number
from compat.tables import Result, load_results, plain_table, proofs
from compat.words import SOURCES, Cell, status_of
from compat.workers import Unit

CONTROL = "control"
"""Asked for like a mode: whether stock leaks in the plain packed call."""
_DRIFT = "autopack expects"
"""How the message of `SiteDrift` begins."""


def find(name: str | None, pre: bool) -> Release:
    """The newest release on the index (or the one named), with the newest packages that its bounds allow."""
    found = _report(f"transformers=={name}" if name else "transformers", pre=pre)
    needs = {need.name: str(need) for need in map(Requirement, found["requires_dist"]) if need.marker is None}
    tokenizers, hub = (_report(needs[package])["version"] for package in ("tokenizers", "huggingface-hub"))
    return Release(found["version"], tokenizers, hub, python=">=3.10,<3.99")


def _report(requirement: str, pre: bool = False) -> dict[str, Any]:
    """The metadata of what pip would install."""
    options = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", *(["--pre"] if pre else [])]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompatError(f"the index has no {requirement}: {done.stderr.strip()}")
    return json.loads(done.stdout)["install"][0]["metadata"]


@dataclass(frozen=True)
class Baseline:
    """The release before, as it is recorded: what its cells were, by task and type."""

    release: Release
    result: Result

    @classmethod
    def before(cls, matrix: Matrix, release: Release) -> Baseline:
        """The newest recorded release that is older."""
        results = load_results(matrix)
        older = [
            each
            for each in matrix.releases
            if number(each.transformers) < number(release.transformers)
            and "cells" in results.get(each.transformers, {})
        ]
        if not older:
            raise CompatError(f"no release before {release.transformers} is recorded; run `python -m compat.run` first")
        return cls(older[-1], results[older[-1].transformers])

    def status(self, task: str, model_type: str, mode: str) -> str | None:
        """The recorded status of a cell; None where there is none."""
        words = self.result["cells"].get(task, {}).get(model_type)
        modes = self.result["modes"]
        return status_of(words[modes.index(mode)]) if words and mode in modes else None


def run(matrix: Matrix, selection: Selection, name: str | None, pre: bool, jobs: int, limit: float) -> int:
    """Measure the newest release, or the one named, and print what differs from the recorded one before it.

    New types are measured in all modes, those that were there in eager mode, with the control; all by the default call,
    so that the table says what the release leaves covered and what `enable` has to prove. Returns 1 where a site has
    drifted, what was exact is no more, or a cell leaks or crashes; 0 where the index has nothing that is not listed.
    """
    release = find(name, pre)
    listed = matrix.releases[-1].transformers
    if name is None and number(release.transformers) <= number(listed):
        print(f"the index has no release beyond {listed}; its newest is {release.transformers}")
        return 0
    before = Baseline.before(matrix, release)
    print(f"{', '.join(release.pins)}, against the recorded {before.release.transformers}", flush=True)
    cache = cache_directory()
    environment = Environment(matrix, release, cache)
    environment.build()
    about = workers.introduction(environment)
    if "types" not in about:
        print(about.get("refused") or about["crash"])
        return 1
    units, new = [], []
    for task in selection.tasks:
        for each in about["types"][task]:
            if selection.types is None or each in selection.types:
                known = each in before.result["cells"].get(task, {})
                modes = ("eager", *([CONTROL] if task == "causal-lm" else [])) if known else selection.modes
                units.append(Unit(task, each, modes))
                new += [] if known else [f"{each} ({task})"]
    cells = list(_measured(environment, units, jobs, limit))
    controls = [cell for cell in cells if cell["mode"] == CONTROL]
    cells = [cell for cell in cells if cell["mode"] != CONTROL]
    drifted = [cell for cell in cells if _DRIFT in cell.get("reason", "")]
    bad = [cell for cell in cells if cell["status"] in ("LEAK", "crash")]
    lost = [
        cell for cell in cells
        if cell["status"] != "exact" and before.status(cell["task"], cell["type"], cell["mode"]) == "exact"
    ]  # fmt: skip
    print(f"\nCells by what `autopack.enable(model)` knew them from\n{table(selection.tasks, cells)}")
    _section("Sites that drifted", drifted)
    _section("Broken, says `autopack doctor` there", _doctor(environment))
    _section("Leaks and crashes", bad)
    _section(f"Exact in {before.release.transformers} and no more", lost)
    _section(f"New model types: {len(new)}", [cell for cell in cells if f"{cell['type']} ({cell['task']})" in new])
    gone = {(task, each) for task in selection.tasks for each in before.result["cells"].get(task, {})}
    gone -= {(task, each) for task, types in about["types"].items() for each in types}
    _section("Model types that are gone", sorted(f"{each} ({task})" for task, each in gone))
    mended = _mended(matrix, before.release, controls, jobs, limit)
    _section("Controls that upstream has mended: stock keeps documents apart in the plain packed call", mended)
    return 1 if drifted or bad or lost else 0


def table(tasks: Sequence[str], cells: Sequence[Cell]) -> str:
    """How many cells of each task are exact, by what was known of them, and how many are not."""
    statuses = ("refused", "LEAK", "crash", "upstream error", "unbuildable", "absent")
    rows = [["task", *SOURCES.values(), *statuses]]
    for task in [*tasks, "all"]:
        chosen = [cell for cell in cells if task in ("all", cell["task"])]
        proven, found = proofs(chosen), Counter(cell["status"] for cell in chosen)
        rows.append([task, *(str(proven[each]) for each in SOURCES), *(str(found[status]) for status in statuses)])
    return plain_table(rows)


def _measured(environment: Environment, units: Sequence[Unit], jobs: int, limit: float) -> Iterator[dict[str, Any]]:
    parts = [units[start::jobs] for start in range(jobs)]
    with tqdm(total=sum(len(unit.modes) for unit in units), unit="cell", disable=None) as bar:

        def measure(part: Sequence[Unit]) -> list[dict[str, Any]]:
            found = []
            for cell in workers.measure(environment, part, limit):
                bar.update()
                found.append(cell)
            return found

        with ThreadPoolExecutor(jobs) as pool:
            yield from chain.from_iterable(pool.map(measure, parts))


def _mended(
    matrix: Matrix, before: Release, controls: Iterable[dict[str, Any]], jobs: int, limit: float
) -> list[dict[str, Any]]:
    """Controls that no longer leak; those that did not in the release before either are left out."""
    silent = [cell for cell in controls if cell["status"] == "exact"]
    if not silent:
        return []
    environment = Environment(matrix, before, cache_directory())
    environment.build()
    earlier = _measured(environment, [Unit(cell["task"], cell["type"], (CONTROL,)) for cell in silent], jobs, limit)
    leaked = {(cell["task"], cell["type"]) for cell in earlier if cell["status"] == "leaks"}
    return [cell for cell in silent if (cell["task"], cell["type"]) in leaked]


def _doctor(environment: Environment) -> list[str]:
    command = [sys.executable, "-m", "autopack", "doctor", "--json"]
    done = subprocess.run(command, env=environment.environ(), capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)["problems"]
    except ValueError:
        return [f"it ended with status {done.returncode}: {done.stderr.strip()[-300:]}"]


def _section(title: str, found: Sequence[dict[str, Any] | str]) -> None:
    """A title with a line for each finding; cells with one result and reason share a line."""
    lines: dict[str, list[str]] = {}
    for each in found:
        if isinstance(each, str):
            lines[each] = []
        else:
            said = f"{each['status']}: {each['reason']}" if "reason" in each else each["status"]
            lines.setdefault(said, []).append(f"{each['type']}/{each['task']}/{each['mode']}")
    print(f"\n{title}" + ("" if found else ": none"))
    for said, names in lines.items():
        print(f"  {said}" + (f"\n    {', '.join(names)}" if names else ""))

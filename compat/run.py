#!/usr/bin/env python3
"""Measure every cell of matrix.toml in every release of transformers that it lists, and record what came out.

    python -m compat.run                              all releases: every type, task and mode, then the scenarios
    python -m compat.run --only 5.3.0 4.57 --jobs 2   some releases, two processes at a time
    python -m compat.run --types llama t5 --modes sdpa    some cells, printed only; with --record also merged
    python -m compat.run --sample 60                  some recorded cells anew: whether they are as they were recorded
    python -m compat.run --newest --pre               a release that is not listed yet: what has changed for autopack

A run that is stopped goes on where it was: cells are kept in the cache, by the code that measured them. The exit
status is 1 where a cell leaks or crashes or a scenario fails. Results go to compat/results/releases, a file for each
release.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: the repository has to be importable in the place of this directory.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from compat import newest, sample, scenarios, workers
from compat.cells import STATUSES
from compat.environments import Environment, cache_directory, check_interpreter
from compat.finished import Finished, code_digest, key_of
from compat.matrix import MATRIX, CompatError, Matrix, Release, Selection, load_matrix
from compat.tables import (
    TABLE,
    Result,
    bad,
    compact,
    counts,
    counts_rows,
    header,
    load_results,
    merged,
    plain_table,
    record,
    stale,
    type_rows,
    write_table,
)

_SHARD = 40
"""Units that one worker is given at most, so that several can share a release; it starts in seconds."""


def say(text: str) -> None:
    """Print a line at once, past the progress bar, so that a log shows where a long run is."""
    tqdm.write(text)
    sys.stdout.flush()


@dataclass
class Measured:
    """One release in a run: what it holds, the cells that are finished, and how many shards are left."""

    release: Release
    environment: Environment
    about: dict[str, Any] = field(default_factory=dict)
    cells: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    shards: int = 0
    result: Result = field(default_factory=dict)


class Run:
    """The releases of one command line, with its options."""

    def __init__(self, matrix: Matrix, arguments: argparse.Namespace) -> None:
        self.matrix, self.arguments = matrix, arguments
        everything = Selection(matrix.tasks, matrix.modes)
        self.selection = selection(matrix, arguments)
        self.whole = self.selection == everything
        self.records = not arguments.ci and (arguments.record or self.whole)
        self.with_scenarios = arguments.scenarios or arguments.ci or self.whole
        self.deep = matrix.deep[:1] if arguments.ci else matrix.deep
        self.digest, self.lock = code_digest(), threading.Lock()
        cache = cache_directory()
        releases = matrix.select(arguments.only) if arguments.only else list(matrix.releases)
        if arguments.ci or (arguments.sample and not arguments.only):
            releases = [release for release in releases if release.ci]
        self.measured = [Measured(release, Environment(matrix, release, cache)) for release in releases]

    def build(self) -> None:
        """Make what is not made yet of the environments."""
        todo = [each for each in self.measured if self.arguments.rebuild or not each.environment.ready]
        with tqdm(todo, unit="release", disable=None) as bar:
            for each in bar:
                bar.set_description(f"installing {each.release.transformers}")
                each.environment.build(self.arguments.rebuild)

    def measure(self) -> None:
        """Measure all cells that are not finished, and record each release when it is."""
        shards: list[tuple[Measured, list[workers.Unit]]] = []
        self._introduce()
        for each in self.measured:
            if not self.arguments.fresh:
                each.cells = self._finished(each).load(of_older_code=self.arguments.keep)
            units = self._left(each)
            each.shards = -(-len(units) // _SHARD)
            shards += [(each, units[start : start + _SHARD]) for start in range(0, len(units), _SHARD)]
            if not units:
                self._finish(each)
        total = sum(len(unit.modes) for _, units in shards for unit in units)
        with tqdm(total=total, unit="cell", disable=None) as bar, ThreadPoolExecutor(self.arguments.jobs) as pool:
            tally: Counter[str] = Counter()

            def shard(each: Measured, units: list[workers.Unit]) -> None:
                for cell in workers.measure(each.environment, units, self.arguments.limit):
                    with self.lock:
                        self._add(each, cell)
                        tally[cell["status"]] += 1
                        bar.set_description(f"{each.release.transformers} {cell['type']}")
                        bar.set_postfix({name: tally[name] for name in ("exact", "refused", "LEAK", "crash")})
                        bar.update()
                with self.lock:
                    each.shards -= 1
                    if not each.shards:
                        self._finish(each)

            for future in [pool.submit(shard, *each) for each in shards]:
                future.result()

    def _introduce(self) -> None:
        environments = [each.environment for each in self.measured]
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            found = pool.map(workers.introduction, environments)
            abouts = list(tqdm(found, "model types", len(environments), unit="release", disable=None, leave=False))
        for each, about in zip(self.measured, abouts, strict=True):
            each.about = about

    def _left(self, each: Measured) -> list[workers.Unit]:
        chosen = self.selection
        units = []
        for task in chosen.tasks:
            for name in each.about.get("types", {}).get(task, ()):
                if chosen.types is None or name in chosen.types:
                    modes = tuple(mode for mode in chosen.modes if (task, name, mode) not in each.cells)
                    units += [workers.Unit(task, name, modes)] if modes else []
        return units

    def _finished(self, each: Measured) -> Finished:
        return Finished(each.environment.cache, each.release.transformers, self.digest)

    def _add(self, each: Measured, cell: dict[str, Any]) -> None:
        self._finished(each).add([cell])
        each.cells[key_of(cell)] = cell
        if cell["status"] in ("LEAK", "crash"):
            name = f"{cell['type']}/{cell['task']}/{cell['mode']}"
            say(f"{each.release.transformers}: {cell['status']}: {name}: {cell['reason']}")

    def _finish(self, each: Measured) -> None:
        chosen, types = self.selection, each.about.get("types", {})
        cells = [
            cell
            for (task, name, mode), cell in each.cells.items()
            if task in chosen.tasks
            and mode in chosen.modes
            and name in types.get(task, ())
            and (chosen.types is None or name in chosen.types)
        ]
        each.result |= compact(each.release, each.about, cells, self.digest)
        found = counts(each.result)
        said = ", ".join(f"{found[status]} {status}" for status in STATUSES if found[status])
        say(f"{each.release.transformers}: {said or each.about.get('refused') or each.about.get('crash')}")
        if self.records:
            record(each.release, each.result if self.whole else merged(each.release, each.result))

    def run_scenarios(self) -> None:
        """Run the scenarios of all releases, and record them beside their cells."""

        def one(each: Measured) -> None:
            start = time.monotonic()
            each.result |= header(each.release, each.about)
            if "types" not in each.about:
                say(f"{each.release.transformers}: no scenarios: {each.about.get('refused', each.about.get('crash'))}")
                return
            found = each.result["scenarios"] = scenarios.run(each.environment, self.deep, 10 * self.arguments.limit)
            said = f"{found['passed']} scenarios passed, {len(found['failed'])} failed"
            say(f"{each.release.transformers}: {said} ({time.monotonic() - start:.0f} s)")
            if not self.arguments.ci and (self.records or self.arguments.scenarios):
                with self.lock:
                    record(each.release, merged(each.release, each.result))

        if self.arguments.scenarios:
            self._introduce()
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            list(tqdm(pool.map(one, self.measured), "scenarios", len(self.measured), unit="release", disable=None))

    def close(self) -> int:
        """Write the table, print what came out, and return the exit status."""
        if not self.arguments.ci:
            write_table(self.matrix)
        results = {each.release.transformers: each.result for each in self.measured}
        if self.selection.types is not None:
            rows = [row for result in results.values() for row in type_rows(result)[1:]]
            head = ["transformers", "task", "model type", *self.selection.modes]
            say("\n" + plain_table([head, *rows]))
            reasons = {n: said for result in results.values() for n, said in result.get("reasons", {}).items()}
            say("\n" + "\n".join(f"{number}  {said}" for number, said in sorted(reasons.items())) if reasons else "")
        rows = counts_rows(self.selection.tasks, results, results)
        say("exact / refused / leaking / crashing cells:\n" + plain_table(rows))
        problems = [f"transformers {name}: {line}" for name, result in results.items() for line in bad(result)]
        for problem in problems:
            say(f"FAILED {problem}")
        return 1 if problems else 0


def selection(matrix: Matrix, arguments: argparse.Namespace) -> Selection:
    """The cells that a command line asks for."""
    if arguments.ci:
        return matrix.ci
    types = tuple(arguments.types) if arguments.types else None
    return Selection(tuple(arguments.tasks or matrix.tasks), tuple(arguments.modes or matrix.modes), types)


def check(matrix: Matrix) -> int:
    """Say what contradicts the matrix among the recorded results and the table, and return the exit status."""
    wrong, missing = stale(matrix)
    for problem in wrong:
        say(problem)
    code = code_digest()
    older = [name for name, result in load_results(matrix).items() if result.get("code", [code]) != [code]]
    if older:
        say(f"Measured with other code than this ({len(older)}; `--sample` finds what differs): {', '.join(older)}")
    if missing:
        say(f"Not recorded yet ({len(missing)} of {len(matrix.releases)}): {', '.join(missing)}")
    say("Run `python -m compat.run` and commit compat/results." if wrong else "The recorded results are fresh.")
    return 1 if wrong else 0


def check_sample(run: Run, number: int, seed: str) -> int:
    """Measure some recorded cells anew and say which differ; the exit status is 1 where any does."""
    start, by_name = time.monotonic(), {each.release.transformers: each.environment for each in run.measured}
    drawn = sample.draw(run.matrix, [each.release for each in run.measured], number, seed)
    say(f"{sum(len(cells) for _, cells in drawn)} cells of {len(drawn)} releases, seed {seed}")
    chosen = [(by_name[release.transformers], cells) for release, cells in drawn]
    found = list(sample.differences(chosen, run.arguments.jobs, run.arguments.limit))
    for line in found:
        say(f"FAILED {line}")
    said = f"{len(found)} differ from the record; measure those releases anew" if found else "all are as recorded"
    say(f"{said} ({time.monotonic() - start:.0f} s); the same again: --sample {number} --seed {seed}")
    return 1 if found else 0


def listing(matrix: Matrix, measured: Iterable[Measured]) -> str:
    """A table of the releases with their environments and whether a result is recorded."""
    results = load_results(matrix)
    rows = [["transformers", "tokenizers", "huggingface-hub", "ci", "environment", "recorded"]]
    for each in measured:
        release = each.release
        state = "ready" if each.environment.ready else "not made"
        recorded = "yes" if release.transformers in results else "no"
        ci = "yes" if release.ci else "no"
        rows.append([release.transformers, release.tokenizers, release.hub, ci, state, recorded])
    return plain_table(rows)


def parse_arguments(argv: Sequence[str] | None, matrix: Matrix) -> argparse.Namespace:
    """The command line of the runner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="RELEASE", help="only these releases (4.57.6 or 4.57)")
    which.add_argument("--ci", action="store_true", help="the slice of .ci/run, with scenarios; records nothing")
    which.add_argument(
        "--newest", action="store_true", help="what the newest release of the index changes for autopack"
    )
    parser.add_argument("--tasks", nargs="+", choices=matrix.tasks, metavar="TASK", help=", ".join(matrix.tasks))
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="only these model types")
    parser.add_argument("--modes", nargs="+", choices=matrix.modes, metavar="MODE", help=", ".join(matrix.modes))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list releases, environments and recorded results")
    what.add_argument("--check", action="store_true", help="fail if a recorded result or the table is out of date")
    what.add_argument("--table", action="store_true", help="write the table from the recorded results")
    what.add_argument("--build", action="store_true", help="make the environments, measure nothing")
    what.add_argument("--scenarios", action="store_true", help="run the scenarios alone, and record them")
    what.add_argument(
        "--sample", type=int, metavar="N", help="measure N recorded cells anew, and fail where one differs"
    )
    parser.add_argument("--seed", help="with --sample: which cells (default: others each time)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default 1)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds for a cell (default 120)")
    parser.add_argument("--fresh", action="store_true", help="measure finished cells anew")
    parser.add_argument("--keep", action="store_true", help="keep finished cells although the code has changed")
    parser.add_argument("--record", action="store_true", help="merge a run of some cells into the recorded results")
    parser.add_argument("--rebuild", action="store_true", help="make the environments anew")
    parser.add_argument("--pre", action="store_true", help="with --newest: pre-releases count")
    parser.add_argument("--release", metavar="RELEASE", help="with --newest: this release, whatever is newest")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status: 0 only if nothing failed."""
    try:
        matrix = load_matrix(MATRIX)
        arguments = parse_arguments(argv, matrix)
        if arguments.check:
            return check(matrix)
        if arguments.table:
            write_table(matrix)
            say(f"wrote {TABLE}")
            return 0
        check_interpreter(matrix)
        if arguments.newest:
            chosen = selection(matrix, arguments)
            return newest.run(matrix, chosen, arguments.release, arguments.pre, arguments.jobs, arguments.limit)
        run = Run(matrix, arguments)
        if arguments.list:
            say(listing(matrix, run.measured))
            return 0
        run.build()
        if arguments.build:
            return 0
        if arguments.sample:
            return check_sample(run, arguments.sample, arguments.seed or sample.new_seed())
        if not arguments.scenarios:
            run.measure()
        if run.with_scenarios:
            run.run_scenarios()
        return run.close()
    except CompatError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; the same command goes on where this one was")
        sys.stdout.flush()
        # Threads wait for workers, which end when their input does.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measure every cell of matrix.toml in every release of transformers that it lists, and record what
came out.

    python -m compat.run                              all releases: every type, task and mode, then the scenarios
    python -m compat.run --only 5.3.0 4.57 --jobs 2   some releases, two processes at a time
    python -m compat.run --types llama t5 --modes sdpa    some cells, printed only; with --record also merged
    python -m compat.run --sample 60                  some recorded cells anew: whether they are as they were recorded

A run that is stopped goes on where it was: cells are kept in the cache, by the code that measured
them. The exit status is 1 where a cell leaks or crashes or a scenario fails. Results go to
compat/results/releases, a file for each release."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: the repository has to be importable in the place of this directory.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from compat import sample, scenarios, torches, workers
from compat.cells import STATUSES
from compat.environments import Environment, check_interpreter
from compat.finished import Finished, code_digest, key_of
from compat.matrix import CompatError, Matrix, Selection, load_matrix
from compat.tables import (
    BAD,
    Result,
    bad,
    compact,
    counts,
    counts_rows,
    load_results,
    merged,
    plain_table,
    record,
    stale,
    write_table,
)


def say(text: str) -> None:
    """Print a line at once, past the progress bar, so that a log shows where a long run is."""
    tqdm.write(text)
    sys.stdout.flush()


@dataclass
class Measured:
    """One release in a run: what it holds, the cells that are finished, and what is recorded of
    them."""

    environment: Environment
    about: dict[str, Any] = field(default_factory=dict)
    cells: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    result: Result = field(default_factory=dict)


class Run:
    """The releases of one command line, with its options."""

    def __init__(self, matrix: Matrix, arguments: argparse.Namespace) -> None:
        self.matrix, self.arguments = matrix, arguments
        types = tuple(arguments.types) if arguments.types else None
        chosen = Selection(
            tuple(arguments.tasks or matrix.tasks), tuple(arguments.modes or matrix.modes), types
        )
        self.selection = matrix.ci if arguments.ci else chosen
        self.whole = self.selection == Selection(matrix.tasks, matrix.modes)
        self.records = not arguments.ci and (arguments.record or self.whole)
        self.digest, self.lock = code_digest(), threading.Lock()
        releases = matrix.select(arguments.only) if arguments.only else list(matrix.releases)
        if arguments.ci or (arguments.sample and not arguments.only):
            releases = [release for release in releases if release.ci]
        self.measured = [Measured(Environment(matrix, release)) for release in releases]

    def build(self) -> None:
        """Make what is not made yet of the environments."""
        for each in tqdm(self.measured, "installing", unit="release", disable=None):
            each.environment.build()

    def measure(self, each: Measured) -> None:
        """Measure all cells of a release that are not finished, and record it."""
        environment, chosen, jobs = each.environment, self.selection, self.arguments.jobs
        finished = Finished(environment.name, self.digest)
        each.about = workers.introduction(environment)
        each.cells = {} if self.arguments.fresh else finished.load()
        wanted = [
            (task, name, mode)
            for task in chosen.tasks
            for name in each.about.get("types", {}).get(task, ())
            if chosen.types is None or name in chosen.types
            for mode in chosen.modes
        ]
        left: dict[tuple[str, str], list[str]] = {}
        for task, name, mode in wanted:
            if (task, name, mode) not in each.cells:
                left.setdefault((task, name), []).append(mode)
        units = [workers.Unit(task, name, tuple(modes)) for (task, name), modes in left.items()]
        tally: Counter[str] = Counter()
        with tqdm(
            total=sum(map(len, left.values())), unit="cell", desc=environment.name, disable=None
        ) as bar:

            def part(units: Sequence[workers.Unit]) -> None:
                for cell in workers.measure(environment, units, self.arguments.limit):
                    with self.lock:
                        finished.add([cell])
                        each.cells[key_of(cell)] = cell
                        tally[cell["status"]] += 1
                        bar.set_postfix({name: tally[name] for name in ("exact", "refused", *BAD)})
                        bar.update()
                        if cell["status"] in BAD:
                            name = f"{cell['type']}/{cell['task']}/{cell['mode']}"
                            say(f"{environment.name}: {cell['status']}: {name}: {cell['reason']}")

            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(part, [units[start::jobs] for start in range(jobs)]))
        each.result = compact(
            environment.release, each.about, [each.cells[key] for key in wanted], self.digest
        )
        found = counts(each.result)
        said = ", ".join(f"{found[status]} {status}" for status in STATUSES if found[status])
        say(f"{environment.name}: {said or each.about.get('refused') or each.about.get('crash')}")
        if self.records:
            record(
                environment.release,
                each.result if self.whole else merged(environment.release, each.result),
            )

    def run_scenarios(self) -> None:
        """Run the scenarios of all releases, and record them beside their cells."""
        deep = self.matrix.deep[:1] if self.arguments.ci else self.matrix.deep

        def one(each: Measured) -> None:
            if "refused" in each.about or "crash" in each.about:
                return
            found = scenarios.run(each.environment, deep, 10 * self.arguments.limit)
            each.result["scenarios"] = found
            say(
                f"{each.environment.name}: {found['passed']} scenarios passed, "
                f"{len(found['failed'])} failed"
            )
            if self.records or self.arguments.scenarios:
                record(each.environment.release, merged(each.environment.release, each.result))

        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            list(pool.map(one, self.measured))

    def close(self) -> int:
        """Write the table, print what came out, and return the exit status."""
        if not self.arguments.ci:
            write_table(self.matrix)
        results = {each.environment.name: each.result for each in self.measured}
        if self.selection.types is not None:
            for name, result in results.items():
                for task, types in result.get("cells", {}).items():
                    for model_type, words in types.items():
                        say(f"{name}  {task}  {model_type}  {', '.join(words)}")
                for number, reason in result.get("reasons", {}).items():
                    say(f"{number}  {reason}")
        rows = counts_rows(self.selection.tasks, results, results)
        say("exact / refused / leaking / crashing cells:\n" + plain_table(rows))
        problems = [
            f"transformers {name}: {line}"
            for name, result in results.items()
            for line in bad(result)
        ]
        for problem in problems:
            say(f"FAILED {problem}")
        return 1 if problems else 0


def check(matrix: Matrix) -> int:
    """Say what contradicts the matrix among the recorded results and the tables, and return the
    exit status."""
    wrong, missing = stale(matrix)
    wrong += torches.stale(matrix)
    for problem in wrong:
        say(problem)
    code = code_digest()
    older = [
        name
        for name, result in load_results(matrix).items()
        if result.get("code", [code]) != [code]
    ]
    if older:
        say(
            f"Measured with other code than this ({len(older)}; `--sample` finds what differs): "
            f"{', '.join(older)}"
        )
    if missing:
        say(f"Not recorded yet ({len(missing)} of {len(matrix.releases)}): {', '.join(missing)}")
    say(
        "Run `python -m compat.run` and commit compat/results."
        if wrong
        else "The recorded results are fresh."
    )
    return 1 if wrong else 0


def check_sample(run: Run, number: int, seed: str) -> int:
    """Measure some recorded cells anew and say which differ; the exit status is 1 where any
    does."""
    drawn = sample.draw([each.environment for each in run.measured], number, seed)
    say(f"{sum(len(cells) for _, cells in drawn)} cells of {len(drawn)} releases, seed {seed}")
    found = list(sample.differences(drawn, run.arguments.jobs, run.arguments.limit))
    for line in found:
        say(f"FAILED {line}")
    said = (
        f"{len(found)} differ from the record; measure those releases anew"
        if found
        else "all are as recorded"
    )
    say(f"{said}; the same again: --sample {number} --seed {seed}")
    return 1 if found else 0


def parse_arguments(argv: Sequence[str] | None, matrix: Matrix) -> argparse.Namespace:
    """The command line of the runner."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--only", nargs="+", metavar="RELEASE", help="only these releases (4.57.6 or 4.57)"
    )
    which.add_argument(
        "--ci", action="store_true", help="the slice of .ci/run, with scenarios; records nothing"
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=matrix.tasks, metavar="TASK", help=", ".join(matrix.tasks)
    )
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="only these model types")
    parser.add_argument(
        "--modes", nargs="+", choices=matrix.modes, metavar="MODE", help=", ".join(matrix.modes)
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="fail if a recorded result or a table is out of date"
    )
    what.add_argument(
        "--scenarios", action="store_true", help="run the scenarios alone, and record them"
    )
    what.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="measure N recorded cells anew, and fail where one differs",
    )
    parser.add_argument("--seed", help="with --sample: which cells (default: others each time)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes at a time (default 1)"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds for a cell (default 120)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure finished cells anew")
    parser.add_argument(
        "--record", action="store_true", help="merge a run of some cells into the recorded results"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status: 0 only if nothing failed."""
    matrix = load_matrix()
    arguments = parse_arguments(argv, matrix)
    try:
        if arguments.check:
            return check(matrix)
        check_interpreter(matrix)
        run = Run(matrix, arguments)
        run.build()
        if arguments.sample:
            return check_sample(run, arguments.sample, arguments.seed or sample.new_seed())
        if not arguments.scenarios:
            for each in run.measured:
                run.measure(each)
        if arguments.scenarios or arguments.ci or run.whole:
            run.run_scenarios()
        return run.close()
    except CompatError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; the same command goes on where this one was")
        # Threads wait for workers, which end when their input does.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())

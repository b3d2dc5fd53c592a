#!/usr/bin/env python3
"""Measure every cell of matrix.toml in every release of transformers that it lists, and record what
came out.

    python -m compat.run                              all releases: every type, task and mode, then the scenarios
    python -m compat.run --only 5.3.0 4.57 --jobs 2   some releases, two processes at a time
    python -m compat.run --types llama t5 --modes sdpa    some cells, printed only; with --record also merged
    python -m compat.run --sample 60                  some recorded cells anew: whether they are as they were recorded

The exit status is 1 where a cell leaks or crashes or a scenario fails. Results go to
compat/results/releases, a file for each release, as soon as that has been measured."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if not __package__:
    # Run as a script: the repository has to be importable in the place of this directory.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from compat import sample, scenarios, study, tables, torches
from compat.environments import Environment, check_interpreter
from compat.matrix import CompatError, Matrix, Selection, load_matrix
from compat.tables import Result, bad, merged, record
from compat.workers import measure_all, say


def check(matrix: Matrix) -> int:
    """Say what contradicts the matrix among the recorded results and the tables, and return the
    exit status."""
    wrong, missing = tables.stale(matrix)
    wrong += torches.STUDY.stale()
    for problem in wrong:
        say(problem)
    if missing:
        say(f"Not recorded yet ({len(missing)} of {len(matrix.releases)}): {', '.join(missing)}")
    advice = "Run `python -m compat.run` and commit compat/results."
    say(advice if wrong else "The recorded results are fresh.")
    return 1 if wrong else 0


def check_sample(environments: list[Environment], asked: argparse.Namespace) -> int:
    """Measure some recorded cells anew and say which differ; the exit status is 1 where any
    does."""
    seed = asked.seed or str(time.time_ns())
    drawn = sample.draw(environments, asked.sample, seed)
    say(f"{sum(len(cells) for _, cells in drawn)} cells of {len(drawn)} releases, seed {seed}")
    found = list(sample.differences(drawn, asked.jobs, asked.limit))
    for line in found:
        say(f"FAILED {line}")
    differ = f"{len(found)} differ from the record; measure those releases anew"
    said = differ if found else "all are as recorded"
    say(f"{said}; the same again: --sample {asked.sample} --seed {seed}")
    return 1 if found else 0


def parse_arguments(argv: Sequence[str] | None, matrix: Matrix) -> argparse.Namespace:
    """The command line of the runner."""
    parser = study.parser_of(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="RELEASE", help="4.57.6 or 4.57")
    which.add_argument("--ci", action="store_true", help="the slice of .ci/run; records nothing")
    parser.add_argument("--tasks", nargs="+", choices=matrix.tasks, default=matrix.tasks)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="only these model types")
    parser.add_argument("--modes", nargs="+", choices=matrix.modes, default=matrix.modes)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail if a result or a table is old")
    what.add_argument("--scenarios", action="store_true", help="run and record the scenarios alone")
    what.add_argument("--sample", type=int, metavar="N", help="hold N cells to their records")
    parser.add_argument("--seed", help="with --sample: which cells (default: others each time)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a cell (120)")
    parser.add_argument("--record", action="store_true", help="merge some cells into the results")
    return parser.parse_args(argv)


def run(matrix: Matrix, asked: argparse.Namespace) -> int:
    """Measure and record what is asked for, print what came out, and return the exit status."""
    check_interpreter(matrix)
    types = tuple(asked.types) if asked.types else None
    chosen = matrix.ci if asked.ci else Selection(tuple(asked.tasks), tuple(asked.modes), types)
    whole = chosen == Selection(matrix.tasks, matrix.modes)
    records = not asked.ci and (asked.record or whole)
    releases = matrix.select(asked.only) if asked.only else matrix.releases
    if asked.ci or (asked.sample and not asked.only):
        releases = [release for release in releases if release.ci]
    environments = [Environment(matrix, release) for release in releases]
    for each in tqdm(environments, "installing", unit="release", disable=None):
        each.build()
    if asked.sample:
        return check_sample(environments, asked)
    results: dict[str, Result] = {each.name: {} for each in environments}
    for each in environments if not asked.scenarios else ():
        result = results[each.name] = measure_all(each, chosen, asked.jobs, asked.limit)
        if records:
            record(each.release, result if whole else merged(each.release, result))
    if asked.scenarios or asked.ci or whole:
        deep = matrix.deep[:1] if asked.ci else matrix.deep

        def of_people(each: Environment) -> None:
            result = results[each.name]
            if "refused" in result or "crash" in result:
                return
            found = result["scenarios"] = scenarios.run(each, deep, 10 * asked.limit)
            say(f"{each.name}: {found['passed']} scenarios passed, {len(found['failed'])} failed")
            if records or asked.scenarios:
                record(each.release, merged(each.release, result))

        with ThreadPoolExecutor(asked.jobs) as pool:
            list(pool.map(of_people, environments))
    if not asked.ci:
        study.settle({tables.table_path(): tables.markdown(matrix, tables.load_results(matrix))})
    for name, result in results.items() if chosen.types is not None else ():
        for task, words_of in result.get("cells", {}).items():
            for model_type, words in words_of.items():
                say(f"{name}  {task}  {model_type}  {', '.join(words)}")
        for number, reason in result.get("reasons", {}).items():
            say(f"{number}  {reason}")
    rows = tables.counts_rows(chosen.tasks, results, results)
    say("\n".join(["exact / refused / leaking / crashing cells:", *tables.markdown_table(rows)]))
    problems = [f"{name}: {line}" for name, result in results.items() for line in bad(result)]
    for problem in problems:
        say(f"FAILED transformers {problem}")
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status: 0 only if nothing failed."""
    matrix = load_matrix()
    asked = parse_arguments(argv, matrix)
    try:
        return check(matrix) if asked.check else run(matrix, asked)
    except CompatError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; what was measured whole is recorded, and `--only` measures the rest")
        # Threads wait for workers, which end when their input does.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())

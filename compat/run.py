#!/usr/bin/env python3
"""Runs the derived tests of tests/compat against every transformers version that matrix.toml lists.

Each version gets a cached environment of its own. Results go to compat/results/<version>.json, and the table in
compat/results/README.md is generated from them. Only the standard library is needed (and tomli on Python 3.10).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: the repository has to be importable in the place of this directory.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compat.environments import Environment, Interpreter, cache_directory, current_interpreter_serves, say
from compat.matrix import MATRIX, ROOT, CompatError, Matrix, Version, load_matrix
from compat.tables import (
    TABLE,
    failures,
    load_results,
    markdown,
    missing_cells,
    parse_report,
    plain_table,
    record,
    stale,
    table_rows,
)

DERIVED_TESTS = Path("tests") / "compat" / "test_exact.py"

# The derived tests read their selection from these, so that the matrix stays the only list.
CELLS_VARIABLE = "AUTOPACK_COMPAT_CELLS"
ABSENT_VARIABLE = "AUTOPACK_COMPAT_ABSENT"

# Run by the environment's interpreter, to record what the tests ran with.
FACTS = """
import json, platform
from importlib.metadata import distributions
packages = {f"{found.metadata['Name']}=={found.version}" for found in distributions()}
print(json.dumps({"python": platform.python_version(), "packages": sorted(packages, key=str.lower)}))
"""


@dataclass(frozen=True)
class Outcome:
    """What came of one version: its result if the tests ran, and everything that went wrong."""

    version: Version
    result: dict[str, Any] | None
    problems: tuple[str, ...] = ()


def derived_environ(matrix: Matrix, version: Version) -> dict[str, str]:
    """The environment variables of a derived run: the selection, no hub, and nothing that alters what is imported."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    environ[CELLS_VARIABLE] = ",".join(matrix.cells_of(version))
    environ[ABSENT_VARIABLE] = ",".join(version.absent)
    environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONDONTWRITEBYTECODE="1")
    # Tiny models gain nothing from threads, and those of several runs at a time spin against each other.
    environ["OMP_NUM_THREADS"] = "1"
    return environ


def run_derived_tests(
    matrix: Matrix, version: Version, python: str, timeout: float
) -> tuple[dict[str, Any], list[str]]:
    """Runs tests/compat/test_exact.py with the interpreter `python`.

    Returns the result as it is recorded, and a line for everything that failed or did not run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [python, "-m", "pytest", str(DERIVED_TESTS), "-q", "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=derived_environ(matrix, version),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompatError(
                f"the derived tests took longer than {timeout:.0f} s; allow more with --timeout."
            ) from error
        cells = parse_report(report.read_text(encoding="utf-8")) if report.is_file() else []
    if done.returncode:
        say(f"--- pytest with transformers {version.transformers} ended with status {done.returncode}")
        say(f"{done.stdout.rstrip()}\n---")
    facts = json.loads(subprocess.run([python, "-c", FACTS], capture_output=True, text=True, check=True).stdout)
    result = {
        "transformers": version.transformers,
        "requirements": matrix.requirements(version),
        "python": facts["python"],
        "platform": f"{platform.system()} {platform.machine()}",
        "cells": cells,
        "packages": facts["packages"],
    }
    problems = failures(result)
    problems += [f"no derived test ran for {cell}" for cell in missing_cells(matrix, version, result)]
    if done.returncode and not problems:
        problems.append(f"pytest ended with status {done.returncode}")
    return result, problems


def serve(matrix: Matrix, version: Version, environment: Environment, arguments: argparse.Namespace) -> Outcome:
    """Makes the environment of a version if it has to, and runs the derived tests in it."""
    name, start = version.transformers, time.monotonic()
    try:
        if arguments.reuse_current and current_interpreter_serves(matrix, version):
            python = sys.executable
        else:
            environment.build(arguments.rebuild)
            python = str(environment.python)
        built = time.monotonic()
        if arguments.build:
            say(f"{name}: environment ready after {built - start:.0f} s")
            return Outcome(version, None)
        result, problems = run_derived_tests(matrix, version, python, arguments.timeout)
    except CompatError as error:
        return Outcome(version, None, (f"transformers {name}: {error}",))
    seconds = f"environment {built - start:.0f} s, tests {time.monotonic() - built:.0f} s"
    say(f"{name}: {'FAILED' if problems else 'passed'} ({seconds}, {python})")
    return Outcome(version, result, tuple(f"transformers {name}: {problem}" for problem in problems))


def run(
    matrix: Matrix, versions: Sequence[Version], environments: dict[str, Environment], arguments: argparse.Namespace
) -> int:
    """Serves the versions, records the results, prints the table, and returns the exit status."""
    with ThreadPoolExecutor(max_workers=max(1, arguments.jobs)) as pool:
        outcomes = list(pool.map(lambda v: serve(matrix, v, environments[v.transformers], arguments), versions))
    results = {outcome.version.transformers: outcome.result for outcome in outcomes if outcome.result is not None}
    if results and not (arguments.no_record or arguments.ci):
        for outcome in outcomes:
            if outcome.result is not None:
                record(outcome.version, outcome.result)
        TABLE.write_text(markdown(matrix, load_results(matrix)), encoding="utf-8")
    if results:
        say("\n" + plain_table(table_rows(matrix, results, versions)))
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    for problem in problems:
        say(f"FAILED {problem}")
    return 1 if problems else 0


def check(matrix: Matrix) -> int:
    """Says what is out of date among the recorded results and the table, and returns the exit status."""
    problems = stale(matrix)
    for problem in problems:
        say(problem)
    say("Run `python compat/run.py` and commit compat/results." if problems else "The recorded results are fresh.")
    return 1 if problems else 0


def listing(matrix: Matrix, versions: Iterable[Version], environments: dict[str, Environment]) -> str:
    """A table of the versions with their environments and whether a result is recorded."""
    results = load_results(matrix)
    rows = [["transformers", "tested", "ci", "environment", "recorded"]]
    for version in versions:
        name = version.transformers
        state = "ready" if environments[name].ready else "not made"
        recorded = "yes" if name in results else "no"
        rows.append([name, f"{len(matrix.cells_of(version))} cells", "yes" if version.ci else "no", state, recorded])
    rows += [[name, "planned", "no", "-", "no"] for name, _ in matrix.planned]
    return plain_table(rows)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line of the runner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="VERSION", help="only these transformers versions")
    which.add_argument("--ci", action="store_true", help="only the versions with ci = true; implies --no-record")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list versions, environments and recorded results")
    what.add_argument("--check", action="store_true", help="fail if a recorded result or the table is out of date")
    what.add_argument("--table", action="store_true", help="write the table from the recorded results")
    what.add_argument("--build", action="store_true", help="make the environments, run no tests")
    parser.add_argument("--rebuild", action="store_true", help="make the environments anew")
    parser.add_argument("--reuse-current", action="store_true", help="use the running interpreter where it fits")
    parser.add_argument("--no-record", action="store_true", help="print the table and leave compat/results alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="versions at a time (default 1)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that environments are made with")
    parser.add_argument("--timeout", type=float, default=1200.0, metavar="S", help="seconds for a version's tests")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the command line asks for and returns the exit status: 0 only if nothing failed."""
    arguments = parse_arguments(argv)
    try:
        matrix = load_matrix(MATRIX)
        versions = matrix.select(arguments.only) if arguments.only else list(matrix.versions)
        if arguments.check:
            return check(matrix)
        if arguments.table:
            TABLE.write_text(markdown(matrix, load_results(matrix)), encoding="utf-8")
            say(f"wrote {TABLE}")
            return 0
        if arguments.ci:
            versions = [version for version in versions if version.ci]
        interpreter, cache = Interpreter.at(arguments.python), cache_directory()
        environments = {v.transformers: Environment(matrix, v, interpreter, cache) for v in versions}
        if arguments.list:
            say(listing(matrix, versions, environments))
            return 0
        return run(matrix, versions, environments, arguments)
    except CompatError as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())

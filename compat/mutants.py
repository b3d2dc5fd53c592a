"""Break autopack on purpose, in one place at a time, and see that its tests notice.

    python -m compat.mutants                     every break of compat/mutants.toml
    python -m compat.mutants --only scan: flex:  those whose names contain one of these
    python -m compat.mutants --list              names, files and tests; runs nothing

A break replaces a piece of text in a copy of the repository, never in the working tree, and the tests that it names are
run there. They have to pass without it and to fail with it. The exit status is 1 where a break survives, where its text
is not found exactly once, where the tests cannot be run with it, and where they fail without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from compat.matrix import ROOT, tomllib
from compat.reliability import packages

_LEFT_OUT = (
    ".git",
    ".envs",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    ".venv",
    "build",
)
_LIMIT = 600.0
"""Seconds after which tests that hang are ended."""


@dataclass(frozen=True)
class Mutant:
    """A piece of the text of a file, what it becomes, and the tests (files or nodes of pytest) that have to notice."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of the file with the break in it; raises `ValueError` where that does not fit exactly once."""
        found = text.count(self.before)
        if found != 1:
            raise ValueError(f"{self.name}: wanted its text once in {self.file}, found it {found} times")
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: whether the tests have noticed it, by which, or why that is not known."""

    mutant: Mutant
    caught: bool
    by: str


def load(root: Path = ROOT) -> list[Mutant]:
    """All mutants of a repository, in the order of the file."""
    data = tomllib.loads((root / "compat" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in data]


def problems(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with mutants without running them: names that come twice, text that is not there, tests neither."""
    found = []
    names = [mutant.name for mutant in mutants]
    found += [f"{name}: there are several of this name" for name in dict.fromkeys(names) if names.count(name) > 1]
    for mutant in mutants:
        try:
            mutant.applied((root / mutant.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            found.append(str(error))
        if mutant.before == mutant.after:
            found.append(f"{mutant.name}: it changes nothing")
        if not mutant.tests:
            found.append(f"{mutant.name}: it names no tests")
        found += [f"{mutant.name}: there is no test {test}" for test in mutant.tests if not _exists(test, root)]
    return found


def _exists(test: str, root: Path) -> bool:
    """Whether a test file, and a class or function in it, are there; parameters are not looked at."""
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    return all(re.search(rf"^\s*(?:class|def) {re.escape(name)}\b", text, re.MULTILINE) for name in names)


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the repository in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="autopack-mutants-") as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        yield copy


def tested(copy: Path, tests: Iterable[str]) -> tuple[int | None, str]:
    """Run tests in a copy up to the first failure: pytest's exit status, None where they hang, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def try_out(mutant: Mutant, copy: Path) -> Outcome:
    """Break a copy, run the tests of the mutant, and mend the copy again."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutant.applied(text), encoding="utf-8")
    except ValueError as error:
        return Outcome(mutant, False, str(error))
    try:
        status, output = tested(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if status == 0:
        return Outcome(mutant, False, "SURVIVES")
    if status is None:
        return Outcome(mutant, True, f"its tests hang for {_LIMIT:.0f} s")
    if status != 1 or failed is None:
        last = next(iter(output.strip().splitlines()[-1:]), "nothing was printed")
        return Outcome(mutant, False, f"the tests did not run (status {status}): {last}")
    return Outcome(mutant, True, failed[1])


def run(mutants: list[Mutant], jobs: int, root: Path) -> list[Outcome]:
    """Try all mutants, `jobs` at a time, each in a copy that nobody else uses meanwhile."""
    with several_copies(jobs, root) as copies, ThreadPoolExecutor(jobs) as pool:

        def one(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return try_out(mutant, copy)
            finally:
                copies.put(copy)

        return list(tqdm(pool.map(one, mutants), total=len(mutants), unit=" mutants", disable=not sys.stderr.isatty()))


@contextmanager
def several_copies(number: int, root: Path) -> Iterator[SimpleQueue[Path]]:
    """Several copies of the repository, in a queue."""
    with copied(root) as first, tempfile.TemporaryDirectory(prefix="autopack-mutants-") as scratch:
        queue: SimpleQueue[Path] = SimpleQueue()
        queue.put(first)
        for place in range(1, number):
            queue.put(Path(shutil.copytree(first, Path(scratch) / str(place))))
        yield queue


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Try the mutants of a repository that are asked for; 1 where one survives or cannot be tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="mutants whose names contain one of these"
    )
    parser.add_argument("--jobs", type=int, default=1, help="tests that run at the same time")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    asked = parser.parse_args(arguments)
    mutants = [mutant for mutant in load(root) if any(part in mutant.name for part in asked.only)]
    if not mutants:
        parser.error(f"no mutant has {' or '.join(asked.only)} in its name; see --list")
    if asked.list:
        print("\n".join(f"{m.name}\n    {m.file}\n    {' '.join(m.tests)}" for m in mutants))
        return 0
    if wrong := problems(mutants, root):
        print("\n".join(wrong))
        return 1
    with copied(root) as copy:
        status, output = tested(copy, dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    if status != 0:
        print(f"{output}\nThe tests fail without any mutant (status {status}); mend that first.")
        return 1
    outcomes = run(mutants, asked.jobs, root)
    width = max(len(mutant.name) for mutant in mutants)
    print("\n".join(f"{o.mutant.name:<{width}}  {'' if o.caught else '!! '}{o.by}" for o in outcomes))
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"\n{len(outcomes)} mutants: {caught} caught, {len(outcomes) - caught} not.")
    if asked.json is not None:
        tried = [{"name": o.mutant.name, "caught": o.caught, "by": o.by} for o in outcomes]
        found = {"with": packages(), "mutants": tried}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())

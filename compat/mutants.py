"""Break autopack on purpose, in one place at a time, and see that its tests notice.

    python -m compat.mutants                     every break of compat/mutants.toml
    python -m compat.mutants --only scan: flex:  those whose names contain one of these
    python -m compat.mutants --list              names, files and tests; runs nothing

A break replaces a piece of text in a copy of the repository, never in the working tree. The tests that it names are run
there twice: without it, for as long as that takes, where they have to pass, and with it, where they have to fail. That
they hang with it is noticed too, once they have taken ten minutes and twenty times what they took without. A line is
printed for each break as soon as it has been tried. The exit status is 1 where a break survives, where its text is not
found exactly once, where the tests cannot be run with it, and where they fail without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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
_PATIENCE, _TIMES = 600.0, 20.0
"""With a break, tests hang that take this many seconds, and so many times what they took without it just before."""


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


@dataclass(frozen=True)
class Tested:
    """A run of tests up to the first failure: pytest's exit status, None where it was ended, and what was printed."""

    status: int | None
    output: str = ""

    @property
    def failed(self) -> str | None:
        """The test that has failed."""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", self.output, re.MULTILINE)
        return None if self.status != 1 or found is None else found[1]

    def __str__(self) -> str:
        last = next(iter(self.output.strip().splitlines()[-1:]), "nothing was printed")
        return self.failed or f"status {self.status}: {last}"


def tested(copy: Path, tests: Iterable[str], limit: float | None) -> Tested:
    """Run tests in a copy; after `limit` seconds they are ended, with all processes that they have started."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=copy, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        _running.add(process.pid)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            return Tested(None)
        finally:
            _running.discard(process.pid)
    return Tested(process.returncode, output)


_running: set[int] = set()
"""The groups of processes that run tests, which an interrupt from a terminal does not reach."""


def _end(group: int) -> None:
    os.killpg(group, signal.SIGKILL)


def try_out(mutant: Mutant, copy: Path) -> Outcome:
    """Run the tests of a mutant in a copy, break it, run them again, and mend it."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    try:
        broken = mutant.applied(text)
    except ValueError as error:
        return Outcome(mutant, False, str(error))
    began = time.perf_counter()
    without = tested(copy, mutant.tests, limit=None)
    took = time.perf_counter() - began
    if without.status != 0:
        return Outcome(mutant, False, f"the tests do not pass without it ({without})")
    limit = max(_PATIENCE, _TIMES * took)
    try:
        path.write_text(broken, encoding="utf-8")
        found = tested(copy, mutant.tests, limit)
    finally:
        path.write_text(text, encoding="utf-8")
    if found.status == 0:
        return Outcome(mutant, False, "SURVIVES")
    if found.status is None:
        return Outcome(
            mutant, True, f"the tests hang: they took {took:.0f} s without it, and over {limit:.0f} s with it"
        )
    if found.failed is None:
        return Outcome(mutant, False, f"the tests did not run ({found})")
    return Outcome(mutant, True, found.failed)


def run(mutants: list[Mutant], jobs: int, root: Path) -> list[Outcome]:
    """Try all mutants, `jobs` at a time, each in a copy that nobody else uses meanwhile; prints each outcome."""
    width = max(len(mutant.name) for mutant in mutants)
    outcomes = []
    with several_copies(jobs, root) as copies, ThreadPoolExecutor(jobs) as pool:

        def one(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return try_out(mutant, copy)
            finally:
                copies.put(copy)

        try:
            for outcome in tqdm(pool.map(one, mutants), total=len(mutants), unit=" mutants", disable=None):
                outcomes.append(outcome)
                with tqdm.external_write_mode():
                    print(f"{outcome.mutant.name:<{width}}  {'' if outcome.caught else '!! '}{outcome.by}", flush=True)
        except BaseException:
            for group in list(_running):
                _end(group)
            raise
    return outcomes


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
    outcomes = run(mutants, asked.jobs, root)
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"\n{len(outcomes)} mutants: {caught} caught, {len(outcomes) - caught} not.")
    if asked.json is not None:
        tried = [{"name": o.mutant.name, "caught": o.caught, "by": o.by} for o in outcomes]
        found = {"with": packages(), "mutants": tried}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())

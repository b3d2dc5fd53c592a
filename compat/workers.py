"""Processes that measure cells inside a release, and what becomes of those that die or do not come
back."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compat.cells import STATUSES
from compat.environments import Environment, TorchEnvironment
from compat.matrix import ROOT, CompatError, Selection
from compat.tables import BAD, Result, compact, counts

_START_LIMIT = 300.0
"""Seconds that imports may take."""
Place = Environment | TorchEnvironment


@dataclass(frozen=True)
class Unit:
    """What is asked for at once: one model type for one task, in some modes."""

    task: str
    type: str
    modes: tuple[str, ...]


class Dead(Exception):
    """A worker ended, or did not answer in time; the message says which."""


class Worker:
    """One process `python -m compat.cells` in a release. `about` is how it introduced itself."""

    def __init__(self, environ: dict[str, str], log: Path, command: Sequence[str]) -> None:
        self._log = log.open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,  # a line that has been read early would not be waited for
        )
        try:
            self.about = self.answer(_START_LIMIT)
        except Dead as error:
            self.stop()
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise CompatError(
                f"a worker did not start: it {error}. The log {log} ends with\n{tail}"
            ) from error

    def ask(self, unit: Unit) -> None:
        """Send a request; its cells are then answered one by one."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(unit)).encode() + b"\n")
        except OSError as error:
            raise Dead("ended before it was asked") from error

    def answer(self, limit: float) -> dict[str, Any]:
        """The next answer; raises `Dead` where there is none within `limit` seconds."""
        answers = self._process.stdout
        assert answers is not None
        if not select.select([answers], [], [], limit)[0]:
            raise Dead(f"took longer than {limit:.0f} s")
        line = answers.readline()
        if not line:
            raise Dead(f"ended with status {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def measure(environment: Place, units: Sequence[Unit], limit: float) -> Iterator[dict[str, Any]]:
    """Measure all units in a release, by one worker after the other.

    A worker that dies or takes longer than `limit` seconds for a cell has crashed in it; the next
    one goes on behind."""
    worker: Worker | None = None
    waiting = list(units)
    try:
        while waiting:
            unit = waiting.pop(0)
            left = list(unit.modes)
            try:
                if worker is None:
                    worker = started(environment)
                worker.ask(unit)
                while left:
                    cell = worker.answer(limit)
                    left.remove(cell["mode"])
                    yield cell
            except Dead as error:
                assert worker is not None
                worker.stop()
                worker = None
                said = f"the worker {error}"
                yield {
                    "task": unit.task,
                    "type": unit.type,
                    "mode": left.pop(0),
                    "status": "crash",
                    "reason": said,
                }
                if left:
                    waiting.insert(0, Unit(unit.task, unit.type, tuple(left)))
    finally:
        if worker is not None:
            worker.stop()


def started(environment: Place) -> Worker:
    """A process that measures in a release."""
    command = [environment.python, "-m", "compat.cells"]
    return Worker(environment.environ(), environment.log, command)


def introduction(environment: Place) -> dict[str, Any]:
    """What a release holds: its packages and model types by task, or why autopack refuses it."""
    worker = started(environment)
    try:
        return worker.about
    finally:
        worker.stop()


def say(text: str) -> None:
    """Print a line at once, past the progress bar, so that a log shows where a long run is."""
    tqdm.write(text)
    sys.stdout.flush()


def measure_all(environment: Place, chosen: Selection, jobs: int, limit: float) -> Result:
    """Measure cells of a release: what is recorded of it."""
    about, cells = introduction(environment), []
    units = [
        Unit(task, name, chosen.modes)
        for task in chosen.tasks
        for name in about.get("types", {}).get(task, ())
        if chosen.types is None or name in chosen.types
    ]
    total = len(units) * len(chosen.modes)
    with tqdm(total=total, unit="cell", desc=environment.name, disable=None) as bar:

        def part(units: Sequence[Unit]) -> None:
            for cell in measure(environment, units, limit):
                cells.append(cell)
                bar.update()
                if cell["status"] in BAD:
                    name = f"{cell['type']}/{cell['task']}/{cell['mode']}"
                    say(f"{environment.name}: {cell['status']}: {name}: {cell['reason']}")

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(part, [units[start::jobs] for start in range(jobs)]))
    result = compact(environment.release, about, cells)
    found = counts(result)
    said = ", ".join(f"{found[status]} {status}" for status in STATUSES if found[status])
    say(f"{environment.name}: {said or about.get('refused') or about.get('crash')}")
    return result

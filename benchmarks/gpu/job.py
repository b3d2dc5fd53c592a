"""One part of a run: what it is given, and how it is run so that nothing of it can end the
others."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.interleave import put

OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
NO_TIME = "no time"


class LeftOut(Exception):
    """A part has nothing to do here; the message says why."""


@dataclass
class Job:
    """What a part is given: the device, whether shapes are tiny, until when it may run, and where
    its result goes.

    `found` is the part's result as far as it has come; what is recorded by `record` outlives a part
    that dies."""

    machine: Machine
    small: bool
    seconds: float
    seed: int = 0
    path: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds that the part may still take."""
        return self.seconds - (time.monotonic() - self.started)

    def record(self, **values: Any) -> None:
        """Add to the result."""
        self.found.update(values)
        self.save({"status": FAILED, "error": {"message": "ended in the middle"}, **self._so_far()})

    def problem(self, text: str) -> None:
        """Note something that is not as it should be: the part goes on, and counts as failed."""
        self.problems.append(text)

    def save(self, outcome: dict[str, Any]) -> None:
        """Write an outcome where the process that started this one reads it."""
        if self.path is not None:
            put(self.path, json.dumps(outcome, default=str))

    def _so_far(self) -> dict[str, Any]:
        return {
            "problems": self.problems,
            "seconds": time.monotonic() - self.started,
            "result": self.found,
        }

    def outcome(self, status: str, **more: Any) -> dict[str, Any]:
        """What is recorded of the part."""
        return {"status": status, **more, **self._so_far()}


@dataclass(frozen=True)
class Part:
    """A part of a run: its name, what it does, and how much of the whole time it may take.

    `run` fills in the result by `Job.record` or returns it; it may raise whatever it likes.
    """

    name: str
    run: Callable[[Job], dict[str, Any] | None]
    share: float


def carry_out(part: Part, job: Job) -> dict[str, Any]:
    """Run a part and return its outcome, whatever happens in it but an end of the process."""
    try:
        with job.machine.kernels():
            job.found.update(part.run(job) or {})
        outcome = job.outcome(FAILED if job.problems else OK)
    except LeftOut as reason:
        outcome = job.outcome(LEFT_OUT, reason=str(reason))
    except (Exception, SystemExit) as error:
        outcome = job.outcome(FAILED, error=told(error))
    job.save(outcome)
    return outcome


def told(error: BaseException) -> dict[str, Any]:
    """An error as it is recorded: its type, its message, and the last lines of its traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {"type": type(error).__name__, "message": str(error)[:2000], "traceback": lines[-12:]}

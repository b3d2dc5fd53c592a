"""What all benchmarks share: memory settings, interleaved timing, and what a result must say about its origin.

Only ratios of arms that ran interleaved in one process mean anything: on a shared machine everything else drifts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopack.bench import machine

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Keep freed memory in the process. Else page faults of large fp32 tensors cost more than some of the arithmetic."""


def keep_freed_memory() -> None:
    """Start this program again with `MALLOC` set: glibc reads it only once, at the start of a process."""
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **MALLOC})


@dataclass
class Times:
    """What one arm took, call by call, in seconds: by the clock, and of processor time over all threads."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, function: Callable[[], Any]) -> None:
        """Time one call."""
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def summary(self) -> dict[str, Any]:
        """Minimum and median by the clock, the median of processor time, and all that they come from."""
        return {
            "min": min(self.wall),
            "median": statistics.median(self.wall),
            "cpu median": statistics.median(self.cpu),
            **asdict(self),
        }


def interleave(
    arms: dict[str, Callable[[], Any]], rounds: int, report: Callable[[str], None] | None = print
) -> dict[str, dict[str, Any]]:
    """Run every arm once per round, beginning with another one in each round; returns the summary of each."""
    times = {name: Times() for name in arms}
    names = list(arms)
    for number in range(rounds):
        for name in machine.in_turn(names, number):
            times[name].run(arms[name])
        if report is not None:
            done = ", ".join(f"{name} {times[name].wall[-1]:.2f} s" for name in names)
            report(f"round {number + 1} of {rounds}: {done}")
    return {name: found.summary() for name, found in times.items()}


def origin() -> dict[str, Any]:
    """When, where and with what: to be taken at the start, so that the load is not one's own."""
    return {
        **machine.origin(),
        "malloc": {name: os.environ.get(name) for name in MALLOC},
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def write(path: Path | None, result: dict[str, Any], text: str) -> None:
    """Print the text, and write it beside the JSON where a path is given."""
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".txt").write_text(text + "\n")


def heading(where: dict[str, Any]) -> str:
    """The origin in two lines."""
    return (
        f"{where['date']}, {where['device']}, {where['cores']} cores, {where['threads']} threads, load at start "
        f"{where['load at start']:.1f}\ntorch {where['torch']}, transformers {where['transformers']}, Python "
        f"{where['python']}\n{where['command']}"
    )

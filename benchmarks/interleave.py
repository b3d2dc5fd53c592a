"""What all benchmarks share: memory settings, interleaved timing, and what a result must say about its origin.

Only ratios of arms that ran interleaved in one process mean anything: on a shared machine everything else drifts.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


def interleave(
    arms: dict[str, Callable[[], float]], rounds: int, report: Callable[[str], None] = print
) -> dict[str, list[float]]:
    """Run every arm once per round, beginning with another one in each round. An arm returns its own seconds."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(arms[name]())
        done = ", ".join(f"{name} {times[name][-1]:.2f} s" for name in names)
        report(f"round {number + 1} of {rounds}: {done}")
    return times


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Minimum and median of each arm, in seconds, and all the times that they come from."""
    return {
        name: {"min": min(values), "median": statistics.median(values), "all": values} for name, values in times.items()
    }


def origin() -> dict[str, Any]:
    """When, where and with what: to be taken at the start, so that the load is not one's own."""
    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load at start": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "malloc": {name: os.environ.get(name) for name in MALLOC},
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


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

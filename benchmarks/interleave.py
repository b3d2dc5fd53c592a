"""What all benchmarks share: memory settings, the race of `autopack bench`, and what a result says of its origin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopack.bench import machine
from autopack.bench.race import Entrant, Lap, race, summary

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Keep freed memory in the process. Else page faults of large fp32 tensors cost more than some of the arithmetic."""

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""Give every tensor above 64 KiB back as it is freed: else a peak is that of the heap and the holes in it."""
STATISTICS = ("median", "min", "cpu median")
STATUS = Path("/proc/self/status")


def keep_freed_memory() -> None:
    """Start this program again with `MALLOC` set: glibc reads it only once, at the start of a process."""
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **MALLOC})


def begin(options: Any) -> dict[str, Any]:
    """Start again with `MALLOC`, set the threads that options ask for, and return the origin of the result."""
    keep_freed_memory()
    import torch

    torch.set_num_threads(options.threads)
    return origin()


def interleave(
    arms: Mapping[str, Callable[[], Any] | Entrant], rounds: int, report: Callable[[str], None] | None = print
) -> dict[str, dict[str, Any]]:
    """Race arms against each other; returns the summary of each."""

    def tell(number: int, laps: dict[str, list[Lap]]) -> None:
        if report is not None:
            done = ", ".join(f"{name} {of[-1]['wall']:.2f} s" for name, of in laps.items())
            report(f"round {number} of {rounds}: {done}")

    return {name: summary(laps) for name, laps in race(arms, rounds, report=tell).items()}


def once(function: Callable[[], Any]) -> dict[str, Any]:
    """The summary of one call, which has no rival."""
    return summary(race({"": function}, 1)[""])


def speeds(times: dict[str, dict[str, Any]], arm: str) -> dict[str, dict[str, float]]:
    """By all others, how many times as fast as one arm they are, in each statistic."""
    own = times[arm]
    return {name: {key: own[key] / of[key] for key in STATISTICS} for name, of in times.items() if name != arm}


def cells(found: Mapping[str, float], form: str) -> str:
    """The statistics of something in columns of a table."""
    return "".join(f"{found[key]:{form}}" for key in STATISTICS)


def elsewhere(*arguments: str, **environment: str) -> Any:
    """What this program with these arguments prints as JSON in a process of its own, without `MALLOC`."""
    clean = {name: value for name, value in os.environ.items() if name not in MALLOC} | environment
    output = subprocess.run([sys.executable, *arguments], env=clean, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def resident(field: str) -> float:
    """A field of what Linux says of this process, in MiB: VmRSS is resident now, VmHWM was at most.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 2**10


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

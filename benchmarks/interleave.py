"""What all benchmarks share: options, memory settings, the race of `autopack bench`, and how results are written."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autopack.bench.race import Entrant, Lap, race
from autopack.commands import keep_freed_memory

STATISTICS = ("median", "min", "cpu median")
NOT_SETTINGS = ("json", "plot", "folder", "part", "page", "minutes")
"""Options that no result depends on."""
Times = dict[str, dict[str, Any]]


def parser(about: str | None, rounds: int | None = None, threads: int | None = 2) -> argparse.ArgumentParser:
    """Return a parser of the options that most benchmarks have: rounds, threads, a seed, and a file for the result."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=rounds, help="of all arms, by turns (%(default)s)")
    if threads is not None:
        found.add_argument("--threads", type=int, default=threads)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", type=Path, help="where to write the result; a .txt goes beside it")
    return found


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """Keep freed memory, set the threads of the options, or one, and return the origin of the result."""
    keep_freed_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts memory, prints lines of its own
    import torch

    torch.set_num_threads(getattr(options, "threads", 1))
    return origin()


def interleave(
    arms: Mapping[str, Callable[[], Any] | Entrant], rounds: int, report: Callable[[str], None] | None = print
) -> Times:
    """Race arms against each other; return the summary of each."""

    def tell(number: int, laps: dict[str, list[Lap]]) -> None:
        if report is not None:
            done = ", ".join(f"{name} {of[-1]['wall']:.2f} s" for name, of in laps.items())
            report(f"round {number} of {rounds}: {done}")

    entered = {name: arm if isinstance(arm, Entrant) else Entrant(arm) for name, arm in arms.items()}
    return {name: summary(laps) for name, laps in race(entered, rounds, report=tell).items()}


def summary(laps: Sequence[Lap]) -> dict[str, Any]:
    """Return least and median by the clock, the median of processor time, and all that they come from."""
    wall, cpu = ([lap[name] for lap in laps] for name in ("wall", "cpu"))
    found = {"min": min(wall), "median": statistics.median(wall), "cpu median": statistics.median(cpu)}
    return {**found, "wall": wall, "cpu": cpu}


def speeds(times: Times, arm: str) -> dict[str, dict[str, float]]:
    """Return, by all others, how many times as fast as one arm they are, in each statistic."""
    own = times[arm]
    return {name: {key: own[key] / of[key] for key in STATISTICS} for name, of in times.items() if name != arm}


def cells(found: Mapping[str, float], form: str) -> str:
    """Return the statistics of something in columns of a table."""
    return "".join(f"{found[key]:{form}}" for key in STATISTICS)


def elsewhere(program: str, *part: Any, options: argparse.Namespace, keep: Iterable[str] = ()) -> Any:
    """Return what a part of a program prints as JSON in a process of its own, where freed memory is given back.

    The options of these names are handed on.
    """
    command = [sys.executable, "-m", program, "--part", *map(str, part)]
    for name in keep:
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def resident() -> int:
    """Return the most bytes that were resident in this process, by what Linux says of it.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 2**10


def origin() -> dict[str, Any]:
    """Return when, where and with what: to be taken at the start, so that the load is not one's own."""
    import torch

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load at start": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a result depends on."""
    return {name: value for name, value in vars(options).items() if name not in NOT_SETTINGS}


def result_of(name: str, options: argparse.Namespace, where: dict[str, Any], **found: Any) -> dict[str, Any]:
    """Return a result as it is written, with its origin and settings."""
    return {"benchmark": name, "origin": where, "settings": settings(options), **found}


def write(path: Path | None, result: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the result in words below its origin, and write both beside each other where a path is given."""
    text = "\n".join([heading(result["origin"]), "", *lines])
    print(text)
    if path is not None:
        put(path, json.dumps(result, indent=1) + "\n")
        put(path.with_suffix(".txt"), text + "\n")


def put(path: Path, text: str) -> None:
    """Write a text under its name when it is whole: whoever is killed in between leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def heading(where: dict[str, Any]) -> str:
    """Return the origin in three lines."""
    return (
        f"{where['date']}, {where['device']}, {where['cores']} cores, {where['threads']} threads, load at start "
        f"{where['load at start']:.1f}\ntorch {where['torch']}, transformers {where['transformers']}, Python "
        f"{where['python']}\n{where['command']}"
    )

"""What all benchmarks share: options, memory settings, the race of `autopack bench`, and how
results are written."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from autopack.bench.race import Entrant, Lap, Spread, kept_by, mebibytes, peak_memory, race
from autopack.commands import keep_freed_memory

Times = dict[str, dict[str, Any]]


def parser(about: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have: rounds, threads, a seed, and a file
    for the result."""
    found = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--rounds", type=int, default=rounds, help="of all arms, by turns (%(default)s)"
    )
    found.add_argument("--threads", type=int, default=2, help="of torch (%(default)s)")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", type=Path, help="where to write the result; a .txt goes beside it")
    return found


@dataclass
class Race:
    """Arms that compute the same, and how many times as fast as others the arm that `leads` is to
    be.

    An arm returns its results, or those and gradients, and has to give what the first gives, unless
    it is `wrong` on purpose: gradients within ten times the `tolerance`, relative, of the sums of
    squares. It is run so many times before it is compared and timed, with 0 not at all. Memory is
    that of arms with `models`; `facts` are said beside."""

    arms: dict[str, Callable[[], Any] | Entrant]
    leads: str
    goals: dict[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    tolerance: float = 1e-5
    warm: int = 1
    models: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arms = self.arms.items()
        self.entrants = {n: arm if isinstance(arm, Entrant) else Entrant(arm) for n, arm in arms}

    def apart(self) -> dict[str, float]:
        """Return how far each arm is from the first: the largest relative error, over what is
        allowed of it."""
        from torch.utils._pytree import tree_leaves

        wanted, found = None, {}
        for name, entrant in self.entrants.items() if self.warm else ():
            with entrant.state():
                entrant.ready()
                result = [entrant.run() for _ in range(self.warm)][-1]
            parts = result if isinstance(result, tuple) else (result, [])
            leaves = [
                [leaf.detach().double().clone() for leaf in tree_leaves(part) if leaf is not None]
                for part in parts
            ]
            wanted = wanted or leaves
            errors = [
                float((one - other).norm() / other.norm()) / allowed
                for allowed, of, others in zip((1, 10), leaves, wanted, strict=True)
                for one, other in zip(of, others, strict=True)
                if other.any() or one.any()
            ]
            found[name] = max(errors, key=lambda error: (error != error, error), default=0.0)
            if name not in self.wrong and not found[name] <= self.tolerance:
                raise SystemExit(
                    f"{name} is {found[name]:.1e} from {next(iter(self.arms))}, allowed "
                    f"{self.tolerance}"
                )
        return found

    def run(self, rounds: int) -> dict[str, Any]:
        """Compare the arms, time them, and return what is written of them."""
        apart = self.apart()
        peaks = {
            name: peak_memory(self.entrants[name].run, kept_by(*parts, {}), "cpu")
            for name, parts in self.models.items()
        }
        times = interleave(self.entrants, rounds)
        found = {
            "seconds": times,
            "faster": faster(times, self.leads),
            "apart": apart,
            "peak bytes": peaks,
        }
        return {"leads": self.leads, "goals": self.goals, "facts": self.facts, **found}


def main(
    name: str,
    about: str | None,
    races: Mapping[str, Callable[[argparse.Namespace], Race]],
    rounds: int = 5,
    *,
    arguments: Sequence[str] | None = None,
    packages: Sequence[str] = (),
    **more: Any,
) -> None:
    """Run races, each made of the options, of which `more` are numbers, words and switches of the
    program's own."""
    found = parser(about, rounds)
    found.add_argument(
        "--only", nargs="+", choices=list(races), default=list(races), help="some of the races"
    )
    for option, value in more.items():
        kind: dict[str, Any] = (
            {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        )
        found.add_argument(f"--{option.replace('_', '-')}", **kind, help="(%(default)s)")
    options = found.parse_args(arguments)
    where, done = begin(options), {}
    for title in options.only:
        print(title, flush=True)
        done[title] = races[title](options).run(options.rounds)
    where |= {package: version(package) for package in packages}
    result = result_of(name, options, where, races=done)
    write(options.json, result, describe(done))


def describe(races: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the results of races in a table each."""
    for title, found in races.items():
        said = [title, *(f"{what} {value}" for what, value in found["facts"].items())]
        yield from ("", ", ".join(said))
        leads = f"{found['leads']} is x as fast"
        yield f"  {'':<16}{'median s':>10}{'min':>10}{'cpu':>10}{leads:>28}{'of sums':>9}{'apart':>9}{'peak MiB':>10}"
        for arm, times in found["seconds"].items():
            clock = "".join(f"{times[key]:>10.4f}" for key in ("median", "min", "cpu median"))
            ratio, goal, apart = (found[key].get(arm) for key in ("faster", "goals", "apart"))
            spread = sums = ""
            if ratio is not None:
                spread = f"{ratio['median']:.2f} ({ratio['low']:.2f}..{ratio['high']:.2f})"
                sums = f"{ratio['of sums']:.3f}"
            far = "" if apart is None else f"{apart:.0e}"
            line = f"  {arm:<16}{clock}{spread:>28}{sums:>9}{far:>9}{mebibytes(found['peak bytes'].get(arm)):>10}"
            if goal is not None:
                line += f"  goal {goal}: {'reached' if ratio['median'] >= goal else 'NOT reached'}"
            yield line


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """Keep freed memory, set the threads of the options, and return the origin of the result."""
    keep_freed_memory()
    # torch's profiler, which counts memory, prints lines of its own
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch

    torch.set_num_threads(options.threads)
    return origin()


def interleave(arms: Mapping[str, Entrant], rounds: int) -> Times:
    """Race arms against each other; return the summary of each."""

    def report(number: int, laps: dict[str, list[Lap]]) -> None:
        done = ", ".join(f"{name} {of[-1]['wall']:.2f} s" for name, of in laps.items())
        print(f"round {number} of {rounds}: {done}")

    return {name: summary(laps) for name, laps in race(arms, rounds, report=report).items()}


def summary(laps: Sequence[Lap]) -> dict[str, Any]:
    """Return least and median by the clock, the median of processor time, and all that they come
    from."""
    wall, cpu = ([lap[name] for lap in laps] for name in ("wall", "cpu"))
    return {
        "median": median(wall),
        "min": min(wall),
        "cpu median": median(cpu),
        "wall": wall,
        "cpu": cpu,
    }


def faster(times: Times, arm: str) -> dict[str, dict[str, float]]:
    """Return, by all others, how many times as fast as they an arm is: round by round, and in all
    rounds together."""
    own, found = times[arm]["wall"], {}
    for name, of in times.items():
        if name != arm:
            spread = Spread.of([a / b for a, b in zip(of["wall"], own, strict=True)])
            found[name] = {**asdict(spread), "of sums": sum(of["wall"]) / sum(own)}
    return found


def resident() -> int:
    """Return the most bytes that were resident in this process, by what Linux says of it.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 2**10


def origin() -> dict[str, Any]:
    """Return when, where and with what: to be taken at the start, so that the load is not one's
    own."""
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
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def result_of(
    name: str, options: argparse.Namespace, where: dict[str, Any], **found: Any
) -> dict[str, Any]:
    """Return a result as it is written, with its origin and the options that it depends on."""
    settings = {option: value for option, value in vars(options).items() if option != "json"}
    return {"benchmark": name, "origin": where, "settings": settings, **found}


def write(path: Path | None, result: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the result in words below its origin, and write both beside each other where a path is
    given."""
    text = "\n".join([heading(result["origin"]), "", *lines])
    print(text)
    if path is not None:
        put(path, json.dumps(result, indent=1) + "\n")
        put(path.with_suffix(".txt"), text + "\n")


def put(path: Path, text: str) -> None:
    """Write a text under its name when it is whole: whoever is killed in between leaves the file as
    it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def heading(where: dict[str, Any]) -> str:
    """Return the origin in three lines."""
    return (
        f"{where['date']}, {where['device']}, {where['cores']} cores, {where['threads']} threads, "
        "load at start "
        f"{where['load at start']:.1f}\ntorch {where['torch']}, transformers "
        f"{where['transformers']}, Python "
        f"{where['python']}\n{where['command']}"
    )

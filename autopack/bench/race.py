"""Timing of arms in turns, by one loop, with the confidence in their ratios, and peak memory.

Only ratios of arms that ran interleaved in one process mean anything: on a shared machine
everything else drifts. Importing this imports no torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Lap = dict[str, float]
"""Seconds of one run by name: `wall` by the clock, `cpu` of the processor."""
CONFIDENCE = 0.95
LEAST = 6
"""Fewer values than these have no interval of that confidence: the least and the greatest of five
have 94 %."""


@dataclass(frozen=True)
class Entrant:
    """Function to time, with the context that it runs in and a preparation that is not timed.

    `ready` is called in the context before the clock starts. `wait` waits for work that a device
    still does.
    """

    run: Callable[[], Any]
    state: Callable[[], AbstractContextManager[Any]] = nullcontext
    ready: Callable[[], Any] = int
    wait: Callable[[], Any] = int

    def __call__(self) -> Lap:
        """Run the function once; return its seconds by the clock and its processor seconds."""
        with self.state():
            self.ready()
            self.wait()
            wall, cpu = time.perf_counter(), time.process_time()
            self.run()
            self.wait()
            return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def race(
    arms: Mapping[str, Callable[[], Lap | None]],
    rounds: int | None = None,
    *,
    until: float = math.inf,
    least: int = 1,
    report: Callable[[int, dict[str, list[Lap]]], Any] = lambda number, laps: None,
) -> dict[str, list[Lap]]:
    """Run every arm once per round, each round beginning with another; return their laps by name.

    There are `rounds` rounds. If that is None, there are at least `least`, and more as long as
    another one should end before `until` (by `time.monotonic`). An arm, such as an `Entrant`,
    returns a lap, or None if it failed: then it is dropped from the result, and the others go on.
    `report` is called after each round.
    """
    laps: dict[str, list[Lap]] = {name: [] for name in arms}
    number, longest = 0, 0.0
    while laps and number != rounds and (number < least or time.monotonic() + longest <= until):
        started, names = time.monotonic(), list(laps)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if (lap := arms[name]()) is None:
                del laps[name]
            else:
                laps[name].append(lap)
        number, longest = number + 1, max(longest, time.monotonic() - started)
        report(number, laps)
    return laps


@dataclass(frozen=True)
class Spread:
    """Median of measured values, and an interval that holds it with 95 % confidence."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the median of measured values with its confidence interval.

        The interval is the narrowest between two of the values that holds the median in 95 of 100
        cases, by the order of values alone, whatever their distribution (the sign test's interval).
        Fewer values than `LEAST` have none of that confidence: theirs goes from the least to the
        greatest.
        """
        ordered, count = sorted(values), len(values)
        outside = accumulate(2 * math.comb(count, cut) / 2**count for cut in range(count // 2))
        inner = max(sum(share <= 1 - CONFIDENCE for share in outside) - 1, 0)
        return cls(statistics.median(ordered), ordered[inner], ordered[count - 1 - inner])

    def __str__(self) -> str:
        decimals = max(0, 3 - len(str(int(self.median))))
        median, low, high = (
            f"{value:,.{decimals}f}" for value in (self.median, self.low, self.high)
        )
        return f"{median} ({low}..{high})"


def verdict(ratio: Spread) -> str:
    """Return a ratio as text, or "too noisy to tell" if its interval holds 1 to two decimals."""
    noisy = round(ratio.low, 2) <= 1 <= round(ratio.high, 2)
    return "too noisy to tell" if noisy else str(ratio)


def wait_for(device: Any) -> None:
    """Wait until a torch device has done all the work that was queued on it."""
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind != "cpu":
        getattr(torch, kind).synchronize()


def kept_by(model: Any, optimizer: Any, call: dict[str, Any]) -> list[Any]:
    """Return all tensors of a model, an optimizer (or None) and a call: they stay between steps."""
    states = (
        []
        if optimizer is None
        else [value for of in optimizer.state.values() for value in of.values()]
    )
    found = [*model.parameters(), *model.buffers(), *states, *call.values()]
    return [value for value in found if hasattr(value, "element_size")]


def peak_memory(step: Callable[[], Any], kept: Iterable[Any], device: str) -> int:
    """Run a step and return its peak memory in bytes, which includes the tensors in `kept`.

    CUDA counts what torch's allocator has handed out. On a CPU it is the bytes of `kept` and the
    highest sum of the allocations and releases that the profiler records; resident memory is more,
    by what Python, torch and the heap hold.
    """
    import torch

    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return int(torch.cuda.max_memory_allocated(device))
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    recorded = [
        event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = [event.nbytes() for event in sorted(recorded, key=lambda event: event.start_ns())]
    return sum(each.numel() * each.element_size() for each in kept) + max(
        accumulate(changes, initial=0)
    )


def mebibytes(count: int | None) -> str:
    """Return a number of bytes as text in MiB; "-" for None."""
    return "-" if count is None else f"{count / 2**20:,.1f}"

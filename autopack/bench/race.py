"""The one loop that times: arms against each other, in turns, and what may be said of their ratios.

Only ratios of arms that ran interleaved in one process mean anything: on a shared machine everything else drifts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

Lap = dict[str, float]
"""Seconds of one run: `wall` by the clock, and others by what they are of."""
CONFIDENCE = 0.95
LEAST = 6
"""Fewer values than these have no interval of that confidence: the least and the greatest of five have 94 %."""
MOST_DIGITS = 3
FASTER, SLOWER, NOISY, TOO_FEW = "faster", "slower", "too noisy to tell", "too few rounds"
"""What is said of a ratio of speeds."""


@dataclass(frozen=True)
class Entrant:
    """A function to time, the state that it runs in, and a function that is called in that state before.

    `wait` is for what a device still does.
    """

    run: Callable[[], Any]
    state: Callable[[], AbstractContextManager[Any]] = nullcontext
    ready: Callable[[], Any] = int
    wait: Callable[[], Any] = int

    def __call__(self) -> Lap:
        """Run once; return the seconds by the clock, and the processor time over all threads."""
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
    """Run every arm once per round, beginning with another one in each round; return the laps of each.

    There are so many `rounds`, or at least `least` and as many as are over before `until` (by `time.monotonic`).
    An arm, such as an `Entrant`, gives a lap, or None where that failed: it leaves, and the others go on. `report` is
    called after each round.
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
    """A median, and an interval that holds it; `count` numbers were measured."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of measured values: the interval is the narrowest of two of them that holds the median in 95 of 100 cases.

        By the order of values alone, whatever their distribution (the sign test's interval). Fewer values than `LEAST`
        have none of that confidence: then it is from the least to the greatest.
        """
        ordered, count = sorted(values), len(values)
        outside, cut = 0.0, 0
        while cut < count // 2:
            outside += 2 * math.comb(count, cut) / 2**count
            if outside > 1 - CONFIDENCE:
                break
            cut += 1
        inner = max(cut - 1, 0)
        return cls(statistics.median(ordered), ordered[inner], ordered[count - 1 - inner], count)

    @property
    def unit(self) -> float:
        """The last decimal place that noise leaves: three digits at most, and one or two of half the interval.

        Two where they are below 25, as the Particle Data Group rounds: one digit of 1.4 would hide a third of it.
        """
        half = (self.high - self.low) / 2
        finest = _place(abs(self.median)) / 10 ** (MOST_DIGITS - 1)
        return max(_place(half / 2.5), finest)

    @property
    def rounded(self) -> Spread:
        """Return the same as it is shown: to the unit, the interval outward."""
        unit = self.unit
        if unit == 0:
            return self
        # A hair inward first: 0.3 / 0.1 is below 3, and 0.7 / 0.1 is above 7.
        low, high = math.floor(self.low / unit + 1e-9), math.ceil(self.high / unit - 1e-9)
        return Spread(round(self.median / unit) * unit, low * unit, high * unit, self.count)

    def __str__(self) -> str:
        decimals = max(0, -math.floor(math.log10(self.unit) + 0.5)) if self.unit else 0
        shown = self.rounded
        median, low, high = (f"{value:,.{decimals}f}" for value in (shown.median, shown.low, shown.high))
        return f"{median} ({low}..{high})"


def _place(value: float) -> float:
    """The value of the first digit's place: 100 for 271; 0 for 0."""
    return 10.0 ** math.floor(math.log10(value)) if value else 0.0


def verdict(ratio: Spread) -> str:
    """Return a ratio of speeds in words, as it is shown: 1 in the interval after rounding is 1 in the interval."""
    if ratio.count < LEAST:
        return TOO_FEW
    shown = ratio.rounded
    if shown.low <= 1 <= shown.high:
        return NOISY
    return FASTER if shown.low > 1 else SLOWER

"""Arms that run the same documents on one model, by turns: their losses, memory and speed, with the
confidence in the ratios.

Only ratios of arms that ran interleaved in one process mean anything: on a shared machine
everything else drifts."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from autopack.errors import in_a_line
from autopack.inspection.configs import text_config
from autopack.inspection.modules import device_of
from autopack.layout import IGNORED_LABEL
from autopack.packing.collator import PackingCollator

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
        """Run the function once, and return its seconds by the clock and on the processor."""
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
    """Run the arms in rounds, by turns, and return the laps, by name, of arms that did not fail.

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
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind != "cpu":
        getattr(torch, kind).synchronize()


def kept_by(model: Any, optimizer: Any, call: dict[str, Any]) -> list[Any]:
    """Return the tensors of a model, an optimizer or None, and a call: they stay between steps."""
    states = () if optimizer is None else optimizer.state.values()
    of_steps = (value for of in states for value in of.values())
    found = (*model.parameters(), *model.buffers(), *of_steps, *call.values())
    return [value for value in found if isinstance(value, torch.Tensor)]


def peak_memory(step: Callable[[], Any], kept: Iterable[Any], device: str) -> int:
    """Run a step and return its peak memory in bytes, which includes the tensors in `kept`.

    CUDA counts what torch's allocator has handed out. On a CPU it is the bytes of `kept` and the
    highest sum of the allocations and releases that the profiler records; resident memory is more,
    by what Python, torch and the heap hold.
    """
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
    """Return bytes as MiB, in text without the unit, such as "1,024.0"; "-" for None."""
    return "-" if count is None else f"{count / 2**20:,.1f}"


PADDED, ROW = "padded", "row"
"""Forms of batches."""
_NO_MEMORY = re.compile("(allocate|enough|out of) memory")


@dataclass
class Batch:
    """Documents of one batch, on a device: the token ids of each, an int64 tensor (length,)."""

    documents: Sequence[torch.Tensor]

    @classmethod
    def of(
        cls, lengths: Sequence[int], tokens: torch.Tensor, seed: int, device: str | torch.device
    ) -> Batch:
        """Return a batch of documents of these lengths, with ids drawn from `tokens`."""
        drawn = torch.randint(
            len(tokens), (sum(lengths),), generator=torch.Generator().manual_seed(seed)
        )
        return cls(tokens[drawn].to(device).split(list(lengths)))

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        return [len(document) for document in self.documents]

    def padded(self, pad_token_id: int = 0) -> dict[str, Any]:
        """Return call arguments, a document per row, padded on the right; all tokens are labels."""
        ids = pad_sequence(list(self.documents), batch_first=True, padding_value=pad_token_id)
        mask = pad_sequence([torch.ones_like(each) for each in self.documents], batch_first=True)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, IGNORED_LABEL),
        }

    def row(self, collate: PackingCollator) -> dict[str, Any]:
        """Return call arguments with all documents packed into one row by a collator."""
        made = collate(
            [dict.fromkeys(("input_ids", "labels"), document.cpu()) for document in self.documents]
        )
        return {name: value.to(self.documents[0].device) for name, value in made.items()}


@dataclass(frozen=True)
class Arm:
    """Case to be timed: a form of batches, run with autopack enabled or without it.

    `form` is `PADDED` or `ROW`. `implementation` is the attention function of the model; None
    leaves the model its own.
    """

    name: str
    form: str
    enabled: bool
    implementation: str | None = None


def calls_of(arm: Arm, model: Any, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return each batch as call arguments in an arm's form; `PackingCollator` makes the rows."""
    if arm.form == PADDED:
        padding = getattr(text_config(model.config), "pad_token_id", None) or 0
        return [batch.padded(padding) for batch in batches]
    # a copy, which does not warn of a stock model
    needs = replace(PackingCollator.for_model(model))
    return [batch.row(needs) for batch in batches]


@dataclass
class Outcome:
    """Results of one arm: its loss, peak memory, and the seconds of every pass over its calls.

    `tokens` are the real tokens of a pass. `same_loss` is True if the loss equals padded's within
    rounding, and None if either has none. `failed` is the error of an arm that failed.
    """

    arm: Arm
    tokens: int
    loss: float | None = None
    same_loss: bool | None = None
    peak_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None
    note: str | None = None

    @property
    def speed(self) -> Spread | None:
        """Real tokens per second; None if the arm failed or was not timed."""
        if self.failed is not None or not self.seconds:
            return None
        return Spread.of([self.tokens / seconds for seconds in self.seconds])

    def over(self, other: Outcome) -> Spread | None:
        """Return the ratio of this arm's speed to another's, or None if one of them has none."""
        if self.speed is None or other.speed is None:
            return None
        return Spread.of([a / b for a, b in zip(other.seconds, self.seconds, strict=True)])

    def as_dict(self, first: Outcome) -> dict[str, Any]:
        """Return the outcome as plain data, with its speed, and the ratio to `first`'s."""
        spreads = {"tokens_per_second": self.speed, "speed_of_padded": self.over(first)}
        return asdict(self) | {name: spread and asdict(spread) for name, spread in spreads.items()}


class Contest:
    """Race of several arms on one model: their calls, an optimizer or none, and their outcomes.

    `state(arm)` is the context in which the model runs the arm. `calls(arm, model, batches)` makes
    the arm's calls, as `calls_of` does.
    """

    def __init__(
        self,
        model: Any,
        arms: Sequence[Arm],
        batches: Sequence[Batch],
        state: Callable[[Arm], AbstractContextManager[Any]],
        optimizer: torch.optim.Optimizer | None = None,
        calls: Callable[[Arm, Any, Sequence[Batch]], list[dict[str, Any]]] = calls_of,
    ) -> None:
        self.model, self.state, self.optimizer = model, state, optimizer
        self.device = device_of(model)
        self.calls = {arm.name: calls(arm, model, batches) for arm in arms}
        tokens = sum(sum(batch.lengths) for batch in batches)
        self.outcomes = [Outcome(arm, tokens) for arm in arms]

    def update(self, call: dict[str, Any]) -> None:
        """Run a training step on a call, or a forward pass if there is no optimizer."""
        with torch.set_grad_enabled(self.optimizer is not None):
            loss = self.model(**call).loss
        if self.optimizer is not None:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def run(self, arm: Arm) -> None:
        """Run all calls of an arm in order."""
        for call in self.calls[arm.name]:
            self.update(call)

    def measure_peak(self, outcome: Outcome) -> None:
        """Record the peak memory of an arm's largest call in `outcome`, in the `state` in force."""
        largest = max(self.calls[outcome.arm.name], key=lambda call: call["input_ids"].numel())
        self.model.train(self.optimizer is not None)
        self.update(largest)
        if self.device.type in ("cpu", "cuda"):
            kept = kept_by(self.model, self.optimizer, largest)
            outcome.peak_bytes = peak_memory(lambda: self.update(largest), kept, str(self.device))

    def race(self, rounds: int | None = None, **options: Any) -> None:
        """Time all arms that have not failed, by turns, and record the seconds in their outcomes.

        Takes the arguments of `autopack.bench.race.race`.
        """
        self.model.train(self.optimizer is not None)
        racing = {
            outcome.arm.name: partial(self._lap, outcome)
            for outcome in self.outcomes
            if outcome.failed is None
        }
        race(racing, rounds, **options)

    def _lap(self, outcome: Outcome) -> Lap | None:
        """Time one pass of an arm, record its seconds and return the lap; None if it failed."""
        arm, call = outcome.arm, torch.no_grad()(self.model.__call__)
        lap = self.attempt(
            outcome,
            Entrant(
                partial(self.run, arm),
                partial(self.state, arm),
                # One-time work of the first call is not timed.
                partial(call, **self.calls[arm.name][0]),
                partial(wait_for, self.device),
            ),
        )
        if lap is not None:
            outcome.seconds.append(lap["wall"])
        return lap

    def attempt(self, outcome: Outcome, act: Callable[[], Any]) -> Any:
        """Return `act()`; if it raises, note why in `outcome.failed`, free memory, return None."""
        try:
            return act()
        except Exception as raised:  # a model may raise anything in one form of the batch alone
            full = isinstance(raised, MemoryError) or _NO_MEMORY.search(str(raised))
            outcome.failed = "out of memory" if full else in_a_line(raised)[:300]
        # Here and not above: an error holds the frames, and they the tensors, of what did not fit.
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

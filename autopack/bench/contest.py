"""Arms that run the same documents on one model, by turns: what they give, what they need, and how fast they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from autopack.bench.batches import BASELINE, STOCK_ROW, Arm, Batch, calls_of
from autopack.bench.machine import kept_by, peak_memory, wait_for
from autopack.bench.race import Entrant, Lap, Spread, race, verdict
from autopack.errors import AutopackError, in_a_line
from autopack.inspection.modules import device_of

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
State = Callable[[Arm], AbstractContextManager[Any]]
CallsOf = Callable[[Arm, Any, Sequence[Batch]], list[dict[str, Any]]]


@dataclass
class Outcome:
    """Results of one arm: its loss, bytes, and seconds of every pass over so many real tokens.

    It is compared with the outcome of the `baseline`, whose is None: losses count as equal within the relative
    `tolerance`.
    """

    arm: Arm
    tokens: int
    baseline: Outcome | None = None
    tolerance: float = 0.0
    loss: float | None = None
    peak: int | None = None
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None
    note: str | None = None

    @property
    def timed(self) -> bool:
        """True if there are times, of every round."""
        return self.failed is None and bool(self.seconds)

    @property
    def speed(self) -> Spread:
        """Real tokens per second of an arm that was timed."""
        return Spread.of([self.tokens / seconds for seconds in self.seconds])

    def over(self, other: Outcome) -> Spread | None:
        """Return how many times as fast as another arm this one is, round by round; None where one was not timed."""
        if not (self.timed and other.timed):
            return None
        return Spread.of([a / b for a, b in zip(other.seconds, self.seconds, strict=True)])

    @property
    def ratio(self) -> Spread | None:
        """Its speed as a multiple of the baseline's."""
        return self.over(self.baseline or self)

    @property
    def difference(self) -> float | None:
        """The relative difference of its loss from the baseline's; None where either has none."""
        wanted = (self.baseline or self).loss
        return abs(self.loss / wanted - 1) if self.loss is not None and wanted else None

    @property
    def same_loss(self) -> bool | None:
        """True if it has the baseline's loss within rounding; None if either has none."""
        off = self.difference
        return None if off is None else math.isfinite(off) and off <= self.tolerance

    @property
    def leaks(self) -> bool:
        """True if it has another loss than the baseline, as packed rows of stock are known to have."""
        return self.same_loss is False and self.arm == STOCK_ROW

    @property
    def wrong(self) -> bool:
        """True if it has another loss than the baseline for no known reason."""
        return self.same_loss is False and self.arm != STOCK_ROW

    @property
    def says(self) -> str:
        """The ratio in words."""
        if self.arm == BASELINE:
            return "what the others are compared with"
        return "nothing to compare with" if self.ratio is None else verdict(self.ratio)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; losses may be what JSON has no number for."""
        return {
            "enabled": self.arm.enabled,
            "packed": self.arm.packed,
            "loss": self.loss,
            "loss, relative difference": self.difference,
            "same loss": self.same_loss,
            "peak bytes": self.peak,
            "seconds": self.seconds,
            "tokens per second": asdict(self.speed) if self.timed else None,
            "speed of padded": None if self.ratio is None else asdict(self.ratio),
            "verdict": self.says if self.timed else None,
            "failed": self.failed,
            "note": self.note,
        }


class Contest:
    """The arms on one model: their calls, which lie on its device, and one optimizer, or none for forward passes.

    `state` puts the model into the state of an arm while the arm runs; `calls` are those of each arm for batches, as
    `calls_of` makes them. The first arm is what the others are compared with.
    """

    def __init__(
        self,
        model: Any,
        arms: Sequence[Arm],
        batches: Sequence[Batch],
        state: State,
        optimizer: torch.optim.Optimizer | None = None,
        tolerance: float = 0.0,
        calls: CallsOf = calls_of,
    ) -> None:
        self.model, self.state, self.optimizer, self.device = model, state, optimizer, device_of(model)
        self.calls = {arm.name: calls(arm, model, batches) for arm in arms}
        few = [Batch([document[:length] for document, length in zip(batches[0].documents, (2, 3), strict=False)])]
        self._few = {arm.name: calls(arm, model, few)[0] for arm in arms}
        tokens = sum(sum(batch.lengths) for batch in batches)
        first = Outcome(arms[0], tokens, tolerance=tolerance)
        self.outcomes = [first, *(Outcome(arm, tokens, first, tolerance) for arm in arms[1:])]

    def update(self, call: dict[str, Any]) -> None:
        """Take a training step, or a forward pass where there is no optimizer."""
        with torch.set_grad_enabled(self.optimizer is not None):
            loss = self.model(**call).loss
        if self.optimizer is not None:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def run(self, arm: Arm) -> None:
        """Run an arm over all of its calls."""
        for call in self.calls[arm.name]:
            self.update(call)

    def measure_peak(self, outcome: Outcome) -> None:
        """Find the memory of the largest call of an arm, of a step after the one that makes what stays."""
        largest = max(self.calls[outcome.arm.name], key=lambda call: call["input_ids"].numel())
        self.model.train(self.optimizer is not None)
        self.update(largest)
        if self.device.type in ("cpu", "cuda"):
            kept = kept_by(self.model, self.optimizer, largest)
            outcome.peak = peak_memory(lambda: self.update(largest), kept, str(self.device))

    def race(
        self,
        rounds: int | None,
        until: float = math.inf,
        least: int = 1,
        report: Callable[[int], Any] = lambda number: None,
    ) -> None:
        """Time the arms that have not failed, as `autopack.bench.race.race` does; `report` gets the round's number."""
        racing = {outcome.arm.name: partial(self._lap, outcome) for outcome in self.outcomes if outcome.failed is None}
        race(racing, rounds, until=until, least=least, report=lambda number, _: report(number))

    def _lap(self, outcome: Outcome) -> Lap | None:
        """Time a lap of an arm; return None where it fails."""
        arm = outcome.arm
        state, ready = partial(self.state, arm), partial(self._get_ready, arm)
        lap = self.attempt(outcome, Entrant(partial(self.run, arm), state, ready, partial(wait_for, self.device)))
        if lap is not None:
            outcome.seconds.append(lap["wall"])
        return lap

    @torch.no_grad()
    def _get_ready(self, arm: Arm) -> None:
        """Do what a first call does that has just been given to a model in the state of an arm."""
        self.model(**self._few[arm.name])

    def attempt(self, outcome: Outcome, act: Callable[[], Any]) -> Any:
        """Return what an act of an arm gives; where it fails, note why, leave room for others, and return None."""
        try:
            return act()
        except AutopackError as raised:
            outcome.failed = f"refused: {in_a_line(raised)}"
        except Exception as raised:  # whatever a model may raise in one form of the batch and not in another
            full = isinstance(raised, MemoryError) or any(said in str(raised) for said in _NO_MEMORY)
            outcome.failed = "out of memory" if full else in_a_line(raised)[:300]
        # Here and not above: an error holds the frames, and they the tensors, of what did not fit.
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

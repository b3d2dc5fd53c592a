"""What a benchmark found: of every arm its loss, its times and its memory, and what may be said of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from autopack.bench.batches import BASELINE, STOCK_ROW, Arm
from autopack.bench.race import Spread, verdict

TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 2e-3, "float16": 1e-3}
"""How far losses may be apart, relative to padded's, and still count as equal: rounding, over thousands of tokens. A
random model's loss moves by a few thousandths where documents see each other."""


@dataclass(frozen=True)
class Settings:
    """What is timed; `batches` and `rounds` of None are as many as fit into the seconds.

    The documents of a batch begin with the same `prompt` of so many tokens.
    """

    batch_size: int = 8
    batches: int | None = None
    rounds: int | None = None
    seconds: float = 60
    forward: bool = False
    backend: str = "auto"
    seed: int = 0
    prompt: int = 0


@dataclass
class Outcome:
    """What became of one arm: the loss, its relative difference from padded's, bytes, and seconds of every pass."""

    arm: Arm
    loss: float | None = None
    difference: float | None = None
    peak: int | None = None
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None
    note: str | None = None

    @property
    def timed(self) -> bool:
        """Whether there are times, of every round."""
        return self.failed is None and bool(self.seconds)


@dataclass
class Result:
    """What `compare` found, in the order of the arms; `documents` are the lengths in every padded batch."""

    settings: Settings
    origin: dict[str, Any]
    model: dict[str, Any]
    documents: list[list[int]]
    columns: dict[str, int]
    padding_of_all: float
    outcomes: list[Outcome]

    @property
    def tokens(self) -> int:
        """Real tokens of a pass."""
        return sum(map(sum, self.documents))

    @property
    def rounds(self) -> int:
        """Rounds in which all arms that were timed ran."""
        return max((len(outcome.seconds) for outcome in self.outcomes if outcome.timed), default=0)

    @property
    def tolerance(self) -> float:
        """How far losses may be apart and still count as equal."""
        return TOLERANCES[self.model["dtype"]]

    def speed(self, outcome: Outcome) -> Spread:
        """Real tokens per second of an arm that was timed."""
        return Spread.of([self.tokens / seconds for seconds in outcome.seconds])

    def ratio(self, outcome: Outcome) -> Spread | None:
        """How many times as fast as padded an arm is, round by round; None where either was not timed."""
        baseline = self.outcomes[0]
        if not (baseline.timed and outcome.timed):
            return None
        return Spread.of([a / b for a, b in zip(baseline.seconds, outcome.seconds, strict=True)])

    def same_loss(self, outcome: Outcome) -> bool | None:
        """Whether an arm has padded's loss within rounding; None where either has none."""
        if outcome.difference is None:
            return None
        return math.isfinite(outcome.difference) and outcome.difference <= self.tolerance

    @property
    def wrong(self) -> list[Outcome]:
        """Arms that compute something else than padded, those that are known to left out."""
        return [o for o in self.outcomes if self.same_loss(o) is False and o.arm != STOCK_ROW]

    def says(self, outcome: Outcome) -> str:
        """What may be said of the ratio of an arm."""
        if outcome.arm == BASELINE:
            return "what the others are compared with"
        ratio = self.ratio(outcome)
        return "nothing to compare with" if ratio is None else verdict(ratio)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data; losses may be what JSON has no number for."""
        arms = {}
        for outcome in self.outcomes:
            ratio = self.ratio(outcome)
            arms[outcome.arm.name] = {
                "enabled": outcome.arm.enabled,
                "packed": outcome.arm.packed,
                "loss": outcome.loss,
                "loss, relative difference": outcome.difference,
                "same loss": self.same_loss(outcome),
                "peak bytes": outcome.peak,
                "seconds": outcome.seconds,
                "tokens per second": asdict(self.speed(outcome)) if outcome.timed else None,
                "speed of padded": None if ratio is None else asdict(ratio),
                "verdict": self.says(outcome) if outcome.timed else None,
                "failed": outcome.failed,
                "note": outcome.note,
            }
        return {
            "benchmark": "bench",
            "origin": self.origin,
            "settings": asdict(self.settings),
            "model": self.model,
            "documents": self.documents,
            "tokens": self.tokens,
            "columns": self.columns,
            "padding of all documents": self.padding_of_all,
            "rounds": self.rounds,
            "loss tolerance": self.tolerance,
            "arms": arms,
        }

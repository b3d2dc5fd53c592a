"""What both comparisons have in common: ways to train on the same batches, in turn, and how far
they are apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopack.demo import LOSS_TOLERANCE, Example, pad
from autopack.layout import IGNORED_LABEL

Tell = Callable[[str], None]
"""Called with a short line at the beginning of every stage."""
Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps the batches that are iterated over."""


class Arm:
    """One of the ways to train: its model, and what was measured in every step.

    Gradients are clipped to a norm of `clip`. Steps of some seeds would otherwise diverge, which
    blows up rounding, whichever way batches are made."""

    def __init__(self, model: Any, optimizer: Any = None, clip: float = 1.0) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.losses: list[float] = []
        self.seconds = 0.0

    def parts(self, batch: Any) -> Iterator[Any]:
        """The loss of a batch in parts, one for each call of the model, whose sum it is."""
        raise NotImplementedError

    def backward(self, batch: Any) -> float:
        """The loss of a batch, whose gradients are added to those of the parameters."""
        self.model.train()
        total = 0.0
        for part in self.parts(batch):
            part.backward()
            total += part.item()
        return total

    def warm_up(self, batch: Any) -> None:
        """Run a batch forwards and backwards without learning from it, so that first-call costs are
        not timed."""
        self.backward(batch)
        self.model.zero_grad()

    def step(self, batch: Any) -> None:
        """Take an optimizer step and record loss and time."""
        import torch

        started = time.perf_counter()
        self.losses.append(self.backward(batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.model.zero_grad()
        self.seconds += time.perf_counter() - started


class LanguageArm(Arm):
    """A way to train a language model: `lay_out` makes calls of a batch."""

    def __init__(
        self, model: Any, lay_out: Callable[[Sequence[Example]], list[dict[str, Any]]], *given: Any
    ) -> None:
        super().__init__(model, *given)
        self.lay_out = lay_out

    def parts(self, batch: Sequence[Example]) -> Iterator[Any]:
        """The loss of each call, weighed by its share of the tokens that all of them predict."""
        calls = self.lay_out(batch)
        counts = [int((call["labels"][:, 1:] != IGNORED_LABEL).sum()) for call in calls]
        for call, count in zip(calls, counts, strict=True):
            yield self.model(**call).loss * (count / sum(counts))


def padded(batch: Sequence[Example]) -> list[dict[str, Any]]:
    """A batch as one padded call, without a cache, as trainers have it: a cache would only make it
    slower."""
    return [{**pad(batch), "use_cache": False}]


def packed(batch: Sequence[Example]) -> list[dict[str, Any]]:
    """A batch as one packed row: tokens, positions that begin anew at each document, labels."""
    import autopack

    return [dict(autopack.PackingCollator()(batch))]


def train(arms: Mapping[str, Arm], batches: Sequence[Any], tell: Tell, progress: Progress) -> None:
    """Train all arms, step by step in turn."""
    tell(f"training in {len(arms)} ways, {len(batches)} steps each")
    for batch in progress(batches):
        for arm in arms.values():
            arm.step(batch)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is shown, by way where there are several; `seconds` also by what was timed.

    The losses of all ways have to be those of documents alone.
    """

    settings: Any
    parameters: int
    threads: int
    real_tokens: int
    padded_tokens: int
    losses: dict[str, list[float]]
    seconds: dict[str, dict[str, float]]

    def speedup(self, way: str, timed: str = "training") -> float:
        """Real tokens per second of a way over those of padded batches."""
        return self.seconds[timed]["padded"] / self.seconds[timed][way]

    @property
    def loss_differences(self) -> list[float]:
        """The largest relative difference of any way's loss from that of documents alone, in every
        step."""
        each = [differences(losses, self.losses["alone"]) for losses in self.losses.values()]
        return list(map(max, zip(*each, strict=True)))

    @property
    def losses_equal(self) -> bool:
        """Whether the losses of all ways agree in all steps, within float32 rounding."""
        return max(self.loss_differences) <= LOSS_TOLERANCE


def measured(arms: Mapping[str, Arm], lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a `Comparison` takes from its arms, and from the lengths in the batches whose tokens it
    counts."""
    import torch

    some = next(iter(arms.values()))
    return {
        "parameters": sum(parameter.numel() for parameter in some.model.parameters()),
        "threads": torch.get_num_threads(),
        "real_tokens": sum(map(sum, lengths)),
        "padded_tokens": sum(len(batch) * max(batch) for batch in lengths),
        "losses": {way: arm.losses for way, arm in arms.items()},
        "seconds": {"training": {way: arm.seconds for way, arm in arms.items()}},
    }


def differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """How far every loss is from what is expected, relative to it; infinite where one is not a
    number."""
    each = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    return [math.inf if math.isnan(difference) else difference for difference in each]


def lengths_of(batches: Sequence[Sequence[Example]]) -> list[list[int]]:
    """The tokens of every example, by mini-batch."""
    return [[len(example["input_ids"]) for example in batch] for batch in batches]

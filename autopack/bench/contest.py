"""Arms that run the same documents on one model, by turns: their losses, memory and speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from autopack.bench.race import Entrant, Lap, Spread, kept_by, peak_memory, race, wait_for
from autopack.errors import in_a_line
from autopack.inspection.configs import text_config
from autopack.inspection.modules import device_of
from autopack.layout import IGNORED_LABEL
from autopack.packing.collator import PackingCollator

PADDED, ROW = "padded", "row"
"""Forms of batches."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass
class Batch:
    """Documents of one batch, on a device: the token ids of each, an int64 tensor (length,)."""

    documents: Sequence[torch.Tensor]

    @classmethod
    def of(
        cls, lengths: Sequence[int], tokens: torch.Tensor, seed: int, device: str | torch.device
    ) -> Batch:
        """Return a batch of documents of these lengths, their ids drawn from `tokens`."""
        drawn = torch.randint(
            len(tokens), (sum(lengths),), generator=torch.Generator().manual_seed(seed)
        )
        return cls(tokens[drawn].to(device).split(list(lengths)))

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        return [len(document) for document in self.documents]

    def padded(self, pad_token_id: int = 0) -> dict[str, Any]:
        """Return a call with a document per row, padded on the right; all tokens are labels."""
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
        """Return the ratio of this arm's speed to another's; None if one was not timed."""
        if self.speed is None or other.speed is None:
            return None
        return Spread.of([a / b for a, b in zip(other.seconds, self.seconds, strict=True)])

    def as_dict(self, first: Outcome) -> dict[str, Any]:
        """Return the outcome as plain data, with its speed as such and relative to `first`."""
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
        self.model, self.state, self.optimizer, self.device = (
            model,
            state,
            optimizer,
            device_of(model),
        )
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
        """Run an arm's largest call twice, and record the second run's peak memory."""
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
        """Time one pass of an arm and record its seconds; return the lap, None if it failed."""
        arm = outcome.arm
        state, ready = partial(self.state, arm), partial(self._warm_up, arm)
        lap = self.attempt(
            outcome, Entrant(partial(self.run, arm), state, ready, partial(wait_for, self.device))
        )
        if lap is not None:
            outcome.seconds.append(lap["wall"])
        return lap

    @torch.no_grad()
    def _warm_up(self, arm: Arm) -> None:
        """Run the first call of an arm without gradients, so that one-time work is not timed."""
        self.model(**self.calls[arm.name][0])

    def attempt(self, outcome: Outcome, act: Callable[[], Any]) -> Any:
        """Return the result of `act()`; if it raises, record why, free memory, return None."""
        try:
            return act()
        except (
            Exception
        ) as raised:  # whatever a model may raise in one form of the batch and not in another
            full = isinstance(raised, MemoryError) or any(
                said in str(raised) for said in _NO_MEMORY
            )
            outcome.failed = "out of memory" if full else in_a_line(raised)[:300]
        # Here and not above: an error holds the frames, and they the tensors, of what did not fit.
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

"""What an audit of somebody's own model may spend: forwards, seconds, and memory as a share of its weights."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import distributed as dist
from torch import nn


class OverBudget(BaseException):
    """A budget is spent; the message says of what, in a clause.

    Not an `Exception`, since those are what models raise: the auditor catches and judges them.
    """


@dataclass(frozen=True)
class Budget:
    """What an audit of a model of any size may spend; nothing more is begun where one of these is used up.

    `forwards` counts calls of the model, with documents of a few dozen tokens together. What is essential takes some 24
    of them and may take all; the search for labels that its loss takes, and what goes beyond, ends where half of them,
    or of the seconds, would be over. `seconds` are looked at before every call, in a single process. `memory` is what
    may be held beside weights and the activations of those tokens, as a share of the weights: gradients are compared
    within it, and calls with hundreds of tokens are made only where theirs fit in it.
    """

    forwards: int = 64
    seconds: float = 120.0
    memory: float = 0.1

    def __str__(self) -> str:
        return f"{self.forwards} forwards, {self.seconds:g} s and {self.memory:.0%} of the weights"


SMALL = Budget(forwards=256)
"""Of a model whose weights need no more than `LEAST_BYTES`: every call form is run."""
LEAST_BYTES = 2**26
"""A share of less is this much: models so small that it matters to them are no burden to anybody."""
LEAST_KEPT = 2**18
"""Bytes of gradients that are held as they are, of one backward pass, where a hundredth of the memory is less."""


def budget_of(model: nn.Module) -> Budget:
    """What an audit of a model may spend where nobody says otherwise."""
    return SMALL if weights_of(model) <= LEAST_BYTES else Budget()


def weights_of(model: nn.Module) -> int:
    """How many bytes the weights of a model need."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _in_several_processes() -> bool:
    # One that stops where others go on would leave them waiting for it in a collective, or judge otherwise than they.
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Meter:
    """What of a budget an audit has spent so far."""

    def __init__(self, budget: Budget, model: nn.Module):
        self.budget, self.forwards = budget, 0
        self._most, self._seconds = budget.forwards, budget.seconds
        self._started = time.perf_counter()
        weights = weights_of(model)
        self.bytes = max(int(budget.memory * weights), LEAST_BYTES)
        """What may be held beside weights and activations."""
        self.kept_bytes = max(int(budget.memory * weights) // 100, LEAST_KEPT)
        """What gradients that are held as they are may need, of one backward pass."""
        self._wide = sum(p.shape[-2] for p in model.parameters() if p.dim() > 1)
        self._size = max((p.element_size() for p in model.parameters()), default=4)

    def count(self) -> None:
        """Count a forward that is about to be made. Raises `OverBudget` where none is left."""
        used = time.perf_counter() - self._started
        if used > self._seconds and not _in_several_processes():
            raise OverBudget(f"{self._seconds:g} s were over after {self.forwards} forwards")
        if self.forwards >= self._most:
            raise OverBudget(f"{self.forwards} forwards were made")
        self.forwards += 1

    def halve(self, reserved: int = 0) -> None:
        """Take half of forwards and seconds for all, and of forwards so many fewer, until `restore`."""
        self._most, self._seconds = self.budget.forwards // 2 - reserved, self.budget.seconds / 2

    def restore(self) -> None:
        """Take all of the budget for all again."""
        self._most, self._seconds = self.budget.forwards, self.budget.seconds

    def fits(self, tokens: int) -> bool:
        """Whether what so many tokens leave in every matrix of the model, three times, is within the memory."""
        return 3 * tokens * self._wide * self._size <= self.bytes

"""What an audit of somebody's own model may spend: forwards, and memory as a share of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


class OverBudget(BaseException):
    """A budget is spent; the message says of what, in a clause.

    Not an `Exception`, since those are what models raise: the auditor catches and judges them.
    """


@dataclass(frozen=True)
class Budget:
    """What an audit of a model of any size may spend; nothing more is begun where one of these is used up.

    `forwards` counts calls of the model, with documents of a few dozen tokens together. What is essential takes some 24
    of them and may take all; the search for labels that its loss takes, and what goes beyond, ends where half of them
    would be over. `memory` is what may be held beside weights and the activations of those tokens, as a share of the
    weights: gradients are compared within it, and calls with hundreds of tokens are made only where theirs fit in it.
    """

    forwards: int = 64
    memory: float = 0.1

    def __str__(self) -> str:
        return f"{self.forwards} forwards and {self.memory:.0%} of the weights"


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


class Meter:
    """What of a budget an audit has spent so far."""

    def __init__(self, budget: Budget, model: nn.Module):
        self.budget, self.forwards = budget, 0
        self._most = budget.forwards
        weights = weights_of(model)
        self.bytes = max(int(budget.memory * weights), LEAST_BYTES)
        """What may be held beside weights and activations."""
        self.kept_bytes = max(int(budget.memory * weights) // 100, LEAST_KEPT)
        """What gradients that are held as they are may need, of one backward pass."""
        self._wide = sum(p.shape[-2] for p in model.parameters() if p.dim() > 1)
        self._size = max((p.element_size() for p in model.parameters()), default=4)

    def count(self) -> None:
        """Count a forward that is about to be made. Raises `OverBudget` where none is left."""
        if self.forwards >= self._most:
            raise OverBudget(f"{self.forwards} forwards were made")
        self.forwards += 1

    def halve(self, reserved: int = 0) -> None:
        """Take half of the forwards for all, and so many fewer, until `restore`."""
        self._most = self.budget.forwards // 2 - reserved

    def restore(self) -> None:
        """Take all of the forwards for all again."""
        self._most = self.budget.forwards

    def fits(self, tokens: int) -> bool:
        """Whether what so many tokens leave in every matrix of the model, three times, is within the memory."""
        return 3 * tokens * self._wide * self._size <= self.bytes

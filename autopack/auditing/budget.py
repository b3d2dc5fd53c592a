"""The limits of an audit of a user's own model: forwards, and memory as a share of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


class OverBudget(BaseException):
    """A budget is spent; the message names it, in a clause.

    Not an `Exception`, since models raise those: the auditor catches and judges them.
    """


@dataclass(frozen=True)
class Budget:
    """The spending limits of an audit of a model of any size; at a limit nothing more is begun.

    `forwards` counts calls of the model, with documents of a few dozen tokens together. Essential
    runs take some 24 of them and may take all. The search for labels that the loss takes, and
    further runs, end where half of them would be over. `memory` is the share of the weights that
    may be held beside weights and the activations of those tokens: gradients are compared within
    it, and calls with hundreds of tokens are made only if their activations fit in it.
    """

    forwards: int = 64
    memory: float = 0.1

    def __str__(self) -> str:
        return f"{self.forwards} forwards and {self.memory:.0%} of the weights"


SMALL = Budget(forwards=256)
"""The budget of a model whose weights need no more than `LEAST_BYTES`: every call form is run."""
LEAST_BYTES = 2**26
"""Least memory, in bytes, of a share of the weights.

Models so small that it matters are no burden.
"""
LEAST_KEPT = 2**18
"""Least bytes of gradients, of one backward pass, that are held as they are.

More if a hundredth of the memory is more.
"""


def budget_of(model: nn.Module) -> Budget:
    """Return the default budget of an audit of a model."""
    return SMALL if weights_of(model) <= LEAST_BYTES else Budget()


def weights_of(model: nn.Module) -> int:
    """Return the size of a model's weights in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


class Meter:
    """The part of a budget that an audit has spent so far."""

    def __init__(self, budget: Budget, model: nn.Module):
        self.budget, self.forwards = budget, 0
        self._most = budget.forwards
        weights = weights_of(model)
        self.bytes = max(int(budget.memory * weights), LEAST_BYTES)
        """Bytes that may be held beside weights and activations."""
        self.kept_bytes = max(int(budget.memory * weights) // 100, LEAST_KEPT)
        """Bytes of gradients, of one backward pass, that may be held as they are."""
        self._wide = sum(p.shape[-2] for p in model.parameters() if p.dim() > 1)
        self._size = max((p.element_size() for p in model.parameters()), default=4)

    def count(self) -> None:
        """Count a forward that is about to be made. Raises `OverBudget` if none is left."""
        if self.forwards >= self._most:
            raise OverBudget(f"{self.forwards} forwards were made")
        self.forwards += 1

    def halve(self, reserved: int = 0) -> None:
        """Allow half of the forwards, less `reserved`, until `restore`."""
        self._most = self.budget.forwards // 2 - reserved

    def restore(self) -> None:
        """Allow all of the forwards again."""
        self._most = self.budget.forwards

    def fits(self, tokens: int) -> bool:
        """Return True if three times the output of so many tokens in every matrix of the model fits
        in the memory."""
        return 3 * tokens * self._wide * self._size <= self.bytes

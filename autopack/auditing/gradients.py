"""Gradients of all parameters, and their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ROUNDINGS = 4


def gradients(total: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradient of every parameter; zero if it has none."""
    # Documents alone are in the graphs of several call modes.
    return list(torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True))


def gradient_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference of a parameter's gradient, relative to its largest entry.

    0 if there is none, infinite if one is no number. Gradients that are zero but for rounding (biases
    that a softmax or norm cancels) count relative to the largest instead. A few roundings of the
    parameter's own dtype are no difference: some models keep single parameters in bfloat16
    (Apertus), whatever the dtype of the others.
    """
    sizes = [float(wanted.abs().max()) for wanted in expected]
    least = 1e-2 * max([0.0, *sizes])
    errors = [
        float((one - other).abs().max()) / (max(size, least) or 1.0) - _ROUNDINGS * torch.finfo(other.dtype).eps
        for one, other, size in zip(found, expected, sizes, strict=True)
    ]
    return max([0.0, *errors]) if all(error == error for error in errors) else float("inf")


@dataclass
class Gradients:
    """The gradients of all parameters in one backward pass."""

    values: list[torch.Tensor]

    def are_finite(self) -> bool:
        """Return True if all of them are finite numbers."""
        return all(bool(value.isfinite().all()) for value in self.values)

    def is_like(self, other: Gradients) -> bool:
        """Return True if they have the shapes of others, and the same distribution over processes.

        FSDP may have gathered a parameter for one backward pass and shared it out again before the
        next.
        """
        pairs = zip(self.values, other.values, strict=False)
        alike = all(a.shape == b.shape and type(a) is type(b) for a, b in pairs)
        return len(self.values) == len(other.values) and alike

    def error(self, expected: Gradients) -> float:
        """Return the error against expected gradients, as `gradient_error`."""
        return gradient_error(self.values, expected.values)

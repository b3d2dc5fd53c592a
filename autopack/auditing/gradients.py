"""Gradients of all parameters, held as they are, and how far those of two backward passes lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ROUNDINGS = 4


@dataclass
class Whole:
    """The gradients of all parameters of one backward pass, in their order."""

    held: list[torch.Tensor]

    def are_finite(self) -> bool:
        """Whether all of them are numbers."""
        return all(bool(each.isfinite().all()) for each in self.held)

    def is_like(self, other: Whole) -> bool:
        """Whether they have the shapes of others, and are shared out over processes where those are.

        What FSDP has gathered for one backward pass it may have shared out again before the next.
        """
        pairs = zip(self.held, other.held, strict=True)
        return all(a.shape == b.shape and type(a) is type(b) for a, b in pairs)

    def error(self, expected: Whole) -> float:
        """How far they are from what is expected, as `gradient_error` says."""
        return gradient_error(self.held, expected.held)


def gradients(total: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradient of every parameter; zero where it has none."""
    # Documents alone are in the graphs of several call modes.
    return list(torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True))


def gradient_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference of a parameter's gradient, relative to the largest entry of that parameter's gradient."""
    errors = differences(
        [float((f - e).abs().max()) for f, e in zip(found, expected, strict=True)],
        [float(e.abs().max()) for e in expected],
        [e.dtype for e in expected],
    )
    return worst_of(errors)


def differences(
    found: Sequence[float], sizes: Sequence[float], dtypes: Sequence[torch.dtype], beside: float = 0.0
) -> list[float]:
    """Differences of gradients relative to the sizes of the latter; `beside` is the size of one that is not among them.

    Gradients that are zero but for rounding (biases that a softmax or norm cancels) count relative to the largest
    instead. What a few roundings of the parameter's own dtype make is no difference: some models keep single parameters
    in bfloat16 (Apertus), whatever the dtype of the others.
    """
    least = 1e-2 * max([beside, *sizes])
    return [
        difference / (max(size, least) or 1.0) - _ROUNDINGS * torch.finfo(dtype).eps
        for difference, size, dtype in zip(found, sizes, dtypes, strict=True)
    ]


def worst_of(errors: Sequence[float]) -> float:
    """The largest error, 0 where there is none; infinite where one is no number."""
    return max([0.0, *errors]) if all(error == error for error in errors) else float("inf")

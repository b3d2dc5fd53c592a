"""How far what a document got is from what it gets alone, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

_FEW = 16
"""Fewer values than this say nothing of how far others of their kind would lie apart."""
_VALUES = 1 << 24
"""Values that are compared at a time: logits of a long document in float64 would need more memory than the model."""


def error_by_token(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The error at each token of two tensors (tokens, ...), relative to the deviation of all of `expected`: (tokens,).

    It is the root mean square over the channels of a token, in which rounding, other than leaked context, does not grow
    with their number. Infinite where one is no number and the other is. Of whole numbers it is 1 where they differ.
    """
    if not expected.is_floating_point():
        return (found != expected).reshape(len(expected), -1).any(1).double()
    errors = []
    for one, other in zip(_chunks(found), _chunks(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        errors.append((one - other).masked_fill_(same, 0.0).square_().mean(1).sqrt_())
    return torch.cat(errors).nan_to_num(math.inf, posinf=math.inf) / _scale(expected)


def _scale(expected: torch.Tensor) -> float:
    """The standard deviation of a field; of a few values, which may lie close by chance, their size if that is more."""
    count, total, squares, largest = 0, 0.0, 0.0, 0.0
    for chunk in _chunks(expected):
        values = chunk[chunk.isfinite()]
        if values.numel():
            count, total = count + values.numel(), total + float(values.sum())
            squares, largest = squares + float(values.square().sum()), max(largest, float(values.abs().max()))
    if not count:
        return 1.0
    size = squares / count
    spread = math.sqrt(max(0.0, size - (total / count) ** 2))
    return max(spread, math.sqrt(size) if count < _FEW else 0.0) or largest or 1.0


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(len(tensor), -1)
    for part in flat.split(max(1, _VALUES // max(1, flat.shape[1]))):
        yield part.double()

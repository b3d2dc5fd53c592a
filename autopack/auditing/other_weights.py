"""Give a model other weights for a while: its own in double precision, or some close by."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from autopack.inspection.randomness import normal_numbers

MOST_BYTES = 2**31
"""Largest memory, in bytes, of other weights beside a model's own."""
_APART = 1e-3
"""Relative distance of weights that lie close by.

It is a thousand roundings of float32: a choice that rounding turned becomes clear, and one
document's influence on another stays the same.
"""


def in_double(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in double precision."""
    return weight.detach().double()


def close_by(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with each entry moved by about a thousandth of its size."""
    generator = torch.Generator().manual_seed(weight.numel())
    noise = normal_numbers(weight.shape, generator).to(weight)
    return weight.detach() * (1 + _APART * noise)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of most of a model's parameters, by their elements."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def can_have_others(model: nn.Module, most: int) -> bool:
    """Return True if all weights are plain, of this process, and fit in double precision."""
    weights = list(model.parameters())
    plain = all(type(p) is nn.Parameter and not p.is_meta and not hasattr(p, "ds_id") for p in weights)
    wrapped = (cls.__module__ for module in model.modules() for cls in type(module).__mro__)
    whole = not any(name.startswith("torch.distributed.") for name in wrapped)
    return plain and whole and sum(p.numel() for p in weights) * 8 <= most


@contextlib.contextmanager
def other_weights(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Run with other parameters and buffers in place of the model's own, which come back."""
    parameters = {
        name: nn.Parameter(change(weight), weight.requires_grad)
        for name, weight in model.named_parameters()
        if weight.is_floating_point()
    }
    # What rounding decides, it decides by weights; of buffers the precision alone has to be theirs.
    buffers = {
        name: in_double(buffer)
        for name, buffer in model.named_buffers()
        if change is in_double and buffer.is_floating_point()
    }
    with _reparametrize_module(model, parameters | buffers, tie_weights=True):
        yield

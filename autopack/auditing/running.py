"""Run a model for the auditor: as it stands, as stock, and with other weights for a while."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel

from autopack.attention.rotary import reset_frequencies
from autopack.auditing.compare import Fields
from autopack.inspection.modules import row_dependent_rotaries
from autopack.inspection.randomness import normal_numbers
from autopack.runtime import scope
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import enabled_in

_MOST_BYTES = 2**31
"""Largest memory, in bytes, of other weights beside a model's own."""
_APART = 1e-3
"""Relative distance of weights that lie close by.

It is a thousand roundings of float32: a choice that rounding turned becomes clear, and one
document's influence on another stays the same.
"""


@contextlib.contextmanager
def stock_again(model: nn.Module, enabled: EnabledModel | None) -> Iterator[None]:
    """Run a model as stock, whatever ran before: rotaries forget the longest position, which sets frequencies."""
    with contextlib.nullcontext() if enabled is None else scope.stock(enabled):
        forget_lengths(model)
        yield


class Runner:
    """One model, and its enabled form if autopack has enabled it."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.enabled: EnabledModel | None = enabled_in(model)

    def stock(self, arguments: dict[str, Any]) -> Any:
        """Return stock's output of a call, whatever ran before it."""
        with stock_again(self.model, self.enabled):
            return self.model(**arguments)

    def gradients(self, total: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of a sum by all trained parameters; zero where one has none."""
        # Documents alone are in the graphs of several call modes.
        given = self.parameters()
        return list(torch.autograd.grad(total, given, retain_graph=True, allow_unused=True, materialize_grads=True))

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad and p.numel()]


def forget_lengths(model: nn.Module) -> None:
    """Make a model's rotary modules forget earlier calls' longest position."""
    for rotary in row_dependent_rotaries(model):
        one = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
        kinds = rotary.__dict__.get("rope_type")
        for kind in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            reset_frequencies(rotary, {"x": one[0].float(), "position_ids": one, **kind})


def weighted_sum(documents: list[Fields], scales: dict[str, float]) -> torch.Tensor | None:
    """Return a differentiable sum over all results with a scale, by fixed random weights per document."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for document in documents:
        for name in sorted(document.keys() & scales.keys()):
            value = document[name]
            if value.requires_grad:
                weights = normal_numbers(value.shape, generator).to(value)
                # What stands for minus infinity at padding has no gradient, and would swallow all else.
                shown = value.where(value.detach().abs() < 1e30, torch.zeros_like(value))
                parts.append((shown * weights).sum() / scales[name])
    return torch.stack([part.double() for part in parts]).sum() if parts else None


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


def can_have_others(model: nn.Module) -> bool:
    """Return True if all weights are plain, of this process, and fit in double precision."""
    weights = list(model.parameters())
    plain = all(type(p) is nn.Parameter and not p.is_meta and not hasattr(p, "ds_id") for p in weights)
    wrapped = (cls.__module__ for module in model.modules() for cls in type(module).__mro__)
    whole = not any(name.startswith("torch.distributed.") for name in wrapped)
    return plain and whole and sum(p.numel() for p in weights) * 8 <= _MOST_BYTES


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

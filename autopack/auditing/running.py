"""Run a model for the auditor: as it stands, as stock, and with fixed random draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.attention.rotary import reset_frequencies
from autopack.auditing.compare import Fields
from autopack.inspection.modules import row_dependent_rotaries
from autopack.inspection.randomness import normal_numbers
from autopack.runtime import scope
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import enabled_in


@contextlib.contextmanager
def stock_again(model: torch.nn.Module, enabled: EnabledModel | None) -> Iterator[None]:
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

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad and p.numel()]


def forget_lengths(model: torch.nn.Module) -> None:
    """Make a model's rotary modules forget earlier calls' longest position."""
    for rotary in row_dependent_rotaries(model):
        one = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
        kinds = rotary.__dict__.get("rope_type")
        for kind in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            reset_frequencies(rotary, {"x": one[0].float(), "position_ids": one, **kind})


def weighted_sum(documents: list[Fields], scales: dict[str, float]) -> torch.Tensor | None:
    """Return a differentiable sum over all results that have a scale, with fixed random weights per document."""
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

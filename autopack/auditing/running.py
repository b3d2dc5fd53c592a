"""Run a model for the auditor: as it stands, and as stock has it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.attention.rotary import reset_frequencies
from autopack.auditing.fields import Fields
from autopack.inspection.modules import row_dependent_rotaries
from autopack.runtime import scope
from autopack.runtime.marks import enabled_in
from autopack.runtime.model import EnabledModel


class Runner:
    """One model, and what autopack has made of it if it has."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.enabled: EnabledModel | None = enabled_in(model)
        self._rotaries = row_dependent_rotaries(model)

    def as_stock(self) -> contextlib.AbstractContextManager[None]:
        """What runs inside runs as it would without autopack. To be entered where it is made: it belongs to a frame."""
        return contextlib.nullcontext() if self.enabled is None else scope.stock(self.enabled)

    def stock(self, arguments: dict[str, Any]) -> Any:
        """What stock gives for a call, whatever ran before it."""
        with self.as_stock():
            forget_lengths(self._rotaries)
            return self.model(**arguments)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad and p.numel()]


def forget_lengths(rotaries: Sequence[torch.nn.Module]) -> None:
    """Have rotary modules whose frequencies depend on the longest position forget that of earlier calls."""
    for rotary in rotaries:
        one = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
        kinds = rotary.__dict__.get("rope_type")
        for kind in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            reset_frequencies(rotary, {"x": one[0].float(), "position_ids": one, **kind})


_ROUNDINGS = 4


def gradients(total: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradient of every parameter; zero where it has none."""
    # Documents alone are in the graphs of several call modes.
    return list(torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True))


def weighted_sum(documents: list[Fields], scales: dict[str, float]) -> torch.Tensor | None:
    """A sum over all results that can be differentiated, with the same random weights for the same documents."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for document in documents:
        for name in sorted(document):
            value = document[name]
            if value.requires_grad:
                weights = torch.randn(value.shape, generator=generator).to(value)
                # What stands for minus infinity at padding has no gradient, and would swallow all else.
                shown = value.where(value.detach().abs() < 1e30, torch.zeros_like(value))
                parts.append((shown * weights).sum() / scales[name])
    return torch.stack([part.double() for part in parts]).sum() if parts else None


def gradient_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference of a parameter's gradient, relative to the largest entry of that parameter's gradient.

    Gradients that are zero but for rounding (biases that a softmax or norm cancels) count relative to the largest
    gradient of the model instead. What a few roundings of the parameter's own dtype make is no difference: some models
    keep single parameters in bfloat16 (Apertus), whatever the dtype of the others.
    """
    sizes = [float(e.abs().max()) for e in expected]
    least = 1e-2 * max(sizes)
    errors = [
        float((f - e).abs().max()) / (max(size, least) or 1.0) - _ROUNDINGS * torch.finfo(e.dtype).eps
        for f, e, size in zip(found, expected, sizes, strict=True)
    ]
    worst = max(0.0, *errors)
    return worst if all(error == error for error in errors) else float("inf")

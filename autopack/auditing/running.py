"""Run a model for the auditor: as it stands, as stock, and with fixed random draws."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.attention.rotary import reset_frequencies
from autopack.auditing.budget import Meter
from autopack.auditing.fields import Fields
from autopack.auditing.gradients import Projections, gradients, projections
from autopack.inspection.modules import row_dependent_rotaries
from autopack.inspection.randomness import normal_numbers
from autopack.runtime import scope
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import enabled_in


class Runner:
    """One model, and its enabled form if autopack has enabled it."""

    def __init__(self, model: PreTrainedModel, meter: Meter | None = None):
        self.model, self.meter = model, meter
        self.enabled: EnabledModel | None = enabled_in(model)
        self.sharded = meter is not None and any(map(_is_sharded, model.modules()))
        """True if parameters, or wrappers, are not plain: other code distributes gradients."""
        self.left_out: set[int] = set()
        """The numbers of the parameters whose gradients need more memory than the budget has."""
        self._rotaries = row_dependent_rotaries(model)

    def as_stock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that runs the model as stock. Enter it in the frame that makes it."""
        return contextlib.nullcontext() if self.enabled is None else scope.stock(self.enabled)

    def run(self, **arguments: Any) -> Any:
        """Return the model's output of a call as it stands, or as stock inside `as_stock`. Raises
        `OverBudget`."""
        if self.meter is not None:
            self.meter.count()
        return self.model(**arguments)

    def stock(self, arguments: dict[str, Any]) -> Any:
        """Return stock's output of a call, whatever ran before it."""
        with self.as_stock():
            forget_lengths(self._rotaries)
            return self.run(**arguments)

    def gradients(self, total: torch.Tensor) -> Projections:
        """Return the gradients of a sum by all trained parameters: whole, or projected."""
        meter, parameters = self.meter, self.parameters()
        if meter is None or self.sharded:
            return Projections(parameters, dict(enumerate(gradients(total, parameters))))
        found = projections(total, parameters, meter.kept_bytes, meter.bytes // 2)
        self.left_out |= found.left_out
        return found

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad and p.numel()]


def _is_sharded(module: torch.nn.Module) -> bool:
    held = [p for p in module.parameters(recurse=False) if p.requires_grad]
    wrapped = any(cls.__module__.startswith("torch.distributed.") for cls in type(module).__mro__)
    return wrapped or any(type(p) is not torch.nn.Parameter or hasattr(p, "ds_id") for p in held)


def forget_lengths(rotaries: Sequence[torch.nn.Module]) -> None:
    """Make rotary modules forget earlier calls' longest position, which sets frequencies."""
    for rotary in rotaries:
        one = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
        kinds = rotary.__dict__.get("rope_type")
        for kind in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            reset_frequencies(rotary, {"x": one[0].float(), "position_ids": one, **kind})


def weighted_sum(documents: list[Fields], scales: dict[str, float]) -> torch.Tensor | None:
    """Return a differentiable sum over all results, with fixed random weights per document."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for document in documents:
        for name in sorted(document):
            value = document[name]
            if value.requires_grad:
                weights = normal_numbers(value.shape, generator).to(value)
                # What stands for minus infinity at padding has no gradient, and would swallow all else.
                shown = value.where(value.detach().abs() < 1e30, torch.zeros_like(value))
                parts.append((shown * weights).sum() / scales[name])
    return torch.stack([part.double() for part in parts]).sum() if parts else None


DRAWN = {"all draws near 0": 1e-4, "all draws near 1": 1 - 1e-4}
"""The share of draws below the fixed draw, by its description."""

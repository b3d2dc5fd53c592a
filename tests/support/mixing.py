"""Leaks that tests plant: a layer that hands tokens something of others, and boundaries that are off by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopack.calls import rows as packed


class Mixing(torch.nn.Module):
    """A layer of the user's that hands every token something of the one before it."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states + 0.1 * torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0)))


def mix(model: Any) -> Any:
    layer = model.model.layers[0]
    layer.mlp = Mixing(layer.mlp)
    return model


def shift_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a leak: what sites are told of the second document begins one token late."""

    def shifted(model: Any, layout: Any, **others: Any) -> Any:
        bounds = layout.bounds.copy()
        bounds[1] += 1
        return scope(model, replace(layout, bounds=bounds, _derived={}), **others)

    scope = packed.Scope
    monkeypatch.setattr(packed, "Scope", shifted)

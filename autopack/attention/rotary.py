"""Rotary embeddings whose frequencies depend on the longest position of the row: chosen per document instead.

longrope switches between two sets of frequencies and dynamic NTK rescales its base, both by the largest position that
the module sees in a call, so a long document changes its short neighbours even where attention keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from autopack.errors import UnsupportedModel
from autopack.runtime.scope import of_model

if TYPE_CHECKING:
    from autopack.layout.packed import PackedLayout
    from autopack.runtime.model import EnabledModel

__all__ = ["PerDocumentRotary", "reset_frequencies", "row_dependent_rotaries"]


def row_dependent_rotaries(root: nn.Module) -> list[nn.Module]:
    """The rotary modules under `root` whose frequencies depend on the longest position of a call."""
    return [module for module in root.modules() if any(map(_row_dependent, _rope_types(module)))]


def _rope_types(module: nn.Module) -> list[str]:
    kind = module.__dict__.get("rope_type")
    return [str(k) for k in kind.values()] if isinstance(kind, dict) else [str(kind)]


def _row_dependent(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


class PerDocumentRotary:
    """Forward hook of a rotary module: recomputes the embeddings of a packed row for each length of document."""

    def __init__(self, model: EnabledModel):
        self.model = model

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        running = of_model(self.model)
        if running is None or running.scope.layout is None:
            return None
        return _per_document(module, running.scope.layout, args, kwargs, output)


@torch._dynamo.disable
def _per_document(
    module: nn.Module, layout: PackedLayout, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    names = ("x", "position_ids", "layer_type")
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    position_ids = call["position_ids"]  # (rows or 1, columns), or those of each axis before (M-RoPE)
    position_ids = position_ids.expand(*position_ids.shape[:-2], layout.rows, layout.columns)
    parts = output if isinstance(output, tuple) else (output,)
    if any(part.dim() != 3 for part in parts):
        raise UnsupportedModel(f"{type(module).__name__} gives frequencies of the longest position for several axes")
    flat = [part.expand(layout.rows, *part.shape[1:]).reshape(-1, *part.shape[2:]).clone() for part in parts]
    for tokens in _groups(layout, position_ids):
        index = torch.from_numpy(tokens).to(position_ids.device)
        group = dict(call, position_ids=position_ids.flatten(-2)[..., index].unsqueeze(-2))
        reset_frequencies(module, call)
        found = type(module).forward(module, **group)
        for whole, part in zip(flat, found if isinstance(found, tuple) else (found,), strict=True):
            whole[index] = part[0]
    reset_frequencies(module, call)
    whole = tuple(f.reshape(layout.rows, layout.columns, *f.shape[1:]) for f in flat)
    return whole if isinstance(output, tuple) else whole[0]


def _groups(layout: PackedLayout, position_ids: torch.Tensor) -> Iterator[np.ndarray]:
    """Tokens of the documents that share their largest position, which is all that the frequencies depend on."""
    lengths = np.diff(layout.bounds)
    if position_ids.dim() == 3:
        highest = position_ids.amax(0).reshape(-1).cpu().numpy()
        largest = np.maximum.reduceat(highest, layout.bounds[:-1])
    else:
        largest = lengths if layout.first_positions is None else lengths + layout.first_positions
    for value in np.unique(largest):
        chosen = np.flatnonzero(largest == value)
        yield np.concatenate([np.arange(layout.bounds[i], layout.bounds[i + 1]) for i in chosen])


def reset_frequencies(module: nn.Module, call: dict[str, Any]) -> None:
    """Forget what earlier calls left behind: dynamic NTK keeps a longer sequence's frequencies until a short one."""
    zero = torch.zeros(1, 1, dtype=torch.long, device=call["position_ids"].device)
    type(module).forward(module, **dict(call, position_ids=zero))

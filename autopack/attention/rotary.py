"""Rotary embeddings whose frequencies depend on the longest position of the row: chosen per
document instead.

longrope switches between two sets of frequencies and dynamic NTK rescales its base, both by the
largest position that the module sees in a call. So a long document changes its short neighbours
even if attention keeps them apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.errors import UnsupportedModel
from autopack.layout.host import host_values, upload
from autopack.layout.packed import PackedLayout
from autopack.runtime.model import Link
from autopack.runtime.scope import Scope, of_model

_ANY_LENGTH = 1 << 31
"""Longest sequence that a module is told to have seen, so that it resets frequencies that another
call set."""


class PerDocumentRotary:
    """Forward hook of a rotary module: embeddings per packed document; None if none is packed."""

    def __init__(self, link: Link):
        self.link = link

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        running = of_model(self.link.follow(module))
        # The rows of a padded batch share what its longest row decides.
        scope = None if running is None or running.scope.as_batch else running.scope
        call = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
        return (
            None
            if scope is None or scope.layout is None
            else _per_document(module, scope, call, output)
        )


@torch._dynamo.disable
def _per_document(module: nn.Module, scope: Scope, call: dict[str, Any], output: Any) -> Any:
    """Return rotary embeddings by each document's longest position; raise for several axes."""
    layout, rows = scope.layout, scope.shared
    assert layout is not None
    # (rows or 1, columns), or those of each axis before (M-RoPE)
    position_ids = call["position_ids"]
    if rows is not None:
        position_ids = rows.whole(position_ids, position_ids.dim() - 1)
    position_ids = position_ids.expand(
        *position_ids.shape[:-2], layout.rows, layout.columns
    ).flatten(-2)
    parts = output if isinstance(output, tuple) else (output,)
    if any(part.dim() != 3 for part in parts):
        raise UnsupportedModel(
            f"{type(module).__name__} gives frequencies of the longest position for several axes, "
            "which autopack cannot give each document. Train the model on padded batches, one "
            "document per row.",
            code="positions-cannot-restart",
        )
    wholes = [part.new_empty(layout.rows, layout.columns, *part.shape[2:]) for part in parts]
    own: Any = _private_copy(module)
    for tokens in _by_largest_position(layout, position_ids):
        index = upload(tokens, position_ids.device)
        reset_frequencies(own, call)
        found = type(own).forward(
            own, **{**call, "position_ids": position_ids[..., index].unsqueeze(-2)}
        )
        for whole, part in zip(
            wholes, found if isinstance(found, tuple) else (found,), strict=True
        ):
            whole.view(-1, *whole.shape[2:])[index] = part[0]
    reset_frequencies(module, call)
    wholes = wholes if rows is None else [rows.part(whole, 1) for whole in wholes]
    return tuple(wholes) if isinstance(output, tuple) else wholes[0]


def _private_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a rotary module with its own buffers, safe from calls in other threads."""
    own = copy.copy(module)
    own._buffers = {
        name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()
    }
    for name in vars(own):
        if name.endswith("max_seq_len_cached"):
            own.__dict__[name] = _ANY_LENGTH
    return own


def _by_largest_position(layout: PackedLayout, position_ids: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield, per largest position, the flat indices of tokens in documents that have it."""
    lengths = layout.sizes
    if position_ids.dim() == 2:  # of several axes
        largest = np.maximum.reduceat(host_values(position_ids.amax(0)), layout.bounds[:-1])
    elif layout.largest_positions is not None:
        largest = layout.largest_positions
    else:
        largest = lengths if layout.first_positions is None else lengths + layout.first_positions
    for value in np.unique(largest):
        yield np.flatnonzero(np.repeat(largest == value, lengths))


def reset_frequencies(module: nn.Module, call: Mapping[str, Any]) -> None:
    """Run a rotary module on position 0, which resets frequencies kept from longer calls."""
    zero = torch.zeros(1, 1, dtype=torch.long, device=call["position_ids"].device)
    type(module).forward(module, **{**call, "position_ids": zero})

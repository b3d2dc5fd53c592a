"""Embeddings of positions that count columns: every document gets those of the first columns."""

from __future__ import annotations

from typing import Any

import torch

from autopack.family import MixerCall

__all__ = ["positions_of_documents"]


def positions_of_documents(call: MixerCall) -> torch.Tensor:
    """Run an embedding of positions for the longest document, and give every token what its place in its document has.

    The module takes tokens (rows, columns, ...) or a shape, and returns (columns, channels) or (rows, columns,
    channels); the result is (rows, columns, channels).
    """
    layout = call.layout

    def change(name: str, value: Any) -> Any:
        if name == "position_ids" and isinstance(value, torch.Tensor):  # columns, in one row or one for each
            return (value if value.dim() == 1 else value[:1])[..., : layout.max_seqlen]
        if name != call.first or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return value[:1, : layout.max_seqlen]
        return torch.Size((1, layout.max_seqlen, *value[2:]))

    table = call.changed(change)
    table = table[0] if table.dim() == 3 else table
    places = layout.derived("places", layout.position_ids)
    return table[places.to(table.device)]

"""SDPA, document by document: by transformers' own function, which in compiled graphs gets a mask of
whole rows."""

from __future__ import annotations

import torch

from autopack.attention import per_document, prefixes
from autopack.attention.call import AttentionCall, Backend
from autopack.inspection import masks
from autopack.layout.packed import PackedLayout


def attend(call: AttentionCall) -> torch.Tensor:
    """Attend within each document."""
    pattern = call.pattern if torch.compiler.is_compiling() else None
    if pattern is None or call.replaces_sdpa or call.options.get("position_bias") is not None:
        return per_document.attend(call)
    options = {**call.options, "is_causal": False}
    return call.original(call.module, *call.states, visible_pairs(call.layout, pattern), **options)[0]


def visible_pairs(layout: PackedLayout, pattern: masks.Pattern) -> torch.Tensor:
    """Return the mask of whole rows, True at pairs that see each other: (R, 1, C, C).

    It is made of the bounds of documents as a tensor, so a compiled graph holds no lengths and
    serves every layout.
    """
    (rows, columns), bounds = layout.shape, layout.kernel_cu_seqlens
    token = torch.arange(rows * columns, dtype=bounds.dtype, device=bounds.device)
    number = torch.searchsorted(bounds, token, right=True)
    place = token - bounds[number - 1]
    number, place = number.view(rows, 1, columns), place.view(rows, 1, columns)
    visible = number[..., None] == number[:, :, None]
    ahead = place[:, :, None] - place[..., None]
    if pattern.causal:
        visible = visible & (ahead <= 0)
    if pattern.before is not None:
        visible = visible & (ahead >= -pattern.before)
    if pattern.after is not None:
        visible = visible & (ahead <= pattern.after)
    if pattern.chunk is not None:
        chunk = place // pattern.chunk
        visible = visible & (chunk[..., None] == chunk[:, :, None])
    return visible


BACKEND = Backend(
    name="sdpa",
    attend=attend,
    over_prefixes=prefixes.by_stretches,
    availability=lambda: (True, "torch.nn.functional.scaled_dot_product_attention"),
    is_own=lambda implementation: implementation == "sdpa",
)

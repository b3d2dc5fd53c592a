"""Llama 4: chunked attention in most layers, and layers without rotary embedding that scale the query by its column.

The temperature of a query grows with its column in the row and not with its position, so a document further right is
scaled more than it would be alone. The chunks are cut by column too, which the mask description already undoes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopack.family import Family, Tiny
from autopack.layout.packed import PackedLayout


def _temperature(module: Any, columns: Tensor) -> Tensor:
    return torch.log1p(torch.floor((columns.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0


def _scale_query_by_position(
    module: Any, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    if module.attn_temperature_tuning and not module.use_rope:
        column = torch.arange(layout.columns, device=query.device)[None]
        # The temperatures are those that the model computes, in float32; only their ratio needs the query's precision.
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        wanted, given = (_temperature(module, c).to(wide) for c in (column - layout.start_columns, column))
        ratio = wanted / given
        query = (query * ratio[:, None, :, None]).to(query.dtype)
    return query, key, value, options


FAMILY = Family(
    name="llama4",
    model_types=frozenset("llama4 llama4_text".split()),
    how="attention site, document by document; query temperature restarts per document",
    adjustments={"Llama4TextAttention": _scale_query_by_position},
    media_types={"image": frozenset({"llama4"})},
    tiny=Tiny(
        configs={
            "llama4_text": {"interleave_moe_layer_step": 2, "moe_layers": [1], "floor_scale": 4},
            "llama4_vision_model": {"intermediate_size": 256}
            | dict.fromkeys("projector_input_dim projector_output_dim vision_output_dim".split(), 64),
        },
        images={"square": frozenset({"llama4"})},
    ),
)

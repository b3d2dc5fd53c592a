"""Attention through the interface beside something that depends on the row: an adjustment, a site
or a mixer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopack.family import Family
from autopack.layout.packed import PackedLayout
from autopack.mixers import ALONE, Alone, Rows


def _scale_query_by_position(
    module: Any,
    layout: PackedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return the call's states and options, with queries scaled by their column in the document.

    The model computes the temperatures in float32; only their ratio needs the precision of the
    query.
    """
    if module.attn_temperature_tuning and not module.use_rope:
        column = torch.arange(layout.columns, device=query.device)[None]
        columns = torch.stack(
            torch.broadcast_tensors(column - layout.start_columns, column)
        ).float()
        scales = (
            torch.log1p(torch.floor((columns + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        )
        wanted, given = scales.to(torch.promote_types(query.dtype, torch.float32))
        query = (query * (wanted / given)[:, None, :, None]).to(query.dtype)
    return query, key, value, options


# Layers without rotary embedding scale the query by its column in the row and not by its position,
# so a document further right is scaled more than it would be alone. The chunks of most layers are
# cut by column too, which the mask description already undoes.
LLAMA4 = Family.of(
    "llama4",
    "llama4 llama4_text",
    "attention site, document by document; query temperature restarts per document",
    adjustments={"Llama4TextAttention": _scale_query_by_position},
)


# Every layer keeps the strongest keys of the row, chosen by a learned score, and drops the others.
# Other documents are masked out of that choice, but keys of equal score (the same token twice) are
# told apart by an order that depends on the length of the row, so a document would keep other keys
# than it does alone.
DOGE = Family.of(
    "doge",
    "doge",
    "the model's own attention, documents alone",
    refusal=lambda config: (
        "with is_moe=True doge routes tokens of all rows and documents together"
        if getattr(config, "is_moe", False)
        else None
    ),
    mixers={"DogeAttention": ALONE},
)

# `token_dropout` scales its embeddings by the share of mask tokens in a row.
ESM = Family.of(
    "esm",
    "esm",
    "attention site, document by document; embeddings of documents alone",
    mixers={"EsmEmbeddings": ALONE},
)

# It joins each token with its left and right neighbour.
MOBILEBERT = Family.of(
    "mobilebert",
    "mobilebert",
    "embeddings of documents alone; attention document by document",
    mixers={"MobileBertEmbeddings": Alone(reads_padding=True)},
)


_EMBEDDINGS = """
CLIPTextEmbeddings CLIPSegTextEmbeddings MetaClip2TextEmbeddings OwlViTTextEmbeddings
Owlv2TextEmbeddings SiglipTextEmbeddings Siglip2TextEmbeddings Tipsv2TextEmbeddings
XCLIPTextEmbeddings
"""
_TYPES = """
clip_text_model clipseg_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model
siglip2_text_model siglip_text_model tipsv2_text_model xclip_text_model
"""

# Embeddings of CLIP's kind look at each token by itself, and refuse rows of more columns than
# positions. What the towers pick of every row is looked after where outputs are (`calls.outputs`).
TEXT_TOWERS = Family.of(
    "text_towers",
    _TYPES,
    "attention site, document by document; embeddings of documents as rows",
    mixers={_EMBEDDINGS: Rows(recurs=False)},
)

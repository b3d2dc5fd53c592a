"""FlashAttention 2, 3 and 4: the user's own implementation, told in-band where the documents lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopack.attention.backends.per_document import Attention, told_causality
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.layout.declarations import LAYOUT_KWARGS
from autopack.layout.packed import PackedLayout

__all__ = ["attend_flash"]


def attend_flash(
    attention: Attention,
    layout: PackedLayout,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask | torch.Tensor | None,
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend by transformers' flash function with cumulative lengths over all flattened rows.

    The function takes windows, softcap and scale from its own arguments, as it does for a document alone. Chunked
    attention becomes documents of one chunk each.
    """
    if isinstance(mask, DocumentMask):
        # Of a rule over per-token blocks flash attention knows nothing for a document alone either.
        if mask.pattern is not None and mask.pattern.chunk is not None:
            layout = layout.in_chunks(mask.pattern.chunk)
    elif mask is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} hands flash attention a mask of its own, of shape {tuple(mask.shape)}; autopack "
            f"cannot split it by documents. Load the model with attn_implementation='sdpa' or 'eager'."
        )
    options = {name: option for name, option in options.items() if name not in (*LAYOUT_KWARGS, "position_ids")}
    options = dict(told_causality(mask, None, options))
    # A length per layout must not reach a compiled graph; the row length is an upper bound.
    longest = layout.columns if torch.compiler.is_compiling() else layout.max_seqlen
    return attention(
        module,
        query,
        key,
        value,
        None,
        cu_seq_lens_q=layout.cu_seqlens,
        cu_seq_lens_k=layout.cu_seqlens,
        max_length_q=longest,
        max_length_k=longest,
        **options,
    )

"""FlexAttention: one BlockMask per kind of layer and forward, made by transformers' own functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, releases
from autopack.layout.declarations import LAYOUT_KWARGS
from autopack.layout.packed import PackedLayout

__all__ = ["attend_flex", "availability", "refusal"]


def availability() -> tuple[bool, str]:
    """Whether the backend can be used here, and why not."""
    if not masks.has_mask_interface():
        return False, f"transformers {releases.VERSION} has no mask interface; it came with 4.53"
    if releases.attention_function("flex_attention") is None:
        return False, "transformers has registered no flex_attention"
    if not torch.cuda.is_available():
        return False, "torch has no backward of flex_attention off CUDA"
    return True, "torch.nn.attention.flex_attention"


def refusal(query: torch.Tensor, mask: DocumentMask | torch.Tensor | None, options: Mapping[str, Any]) -> str | None:
    """Why this attention cannot go to flex_attention, or None where it can."""
    if isinstance(mask, torch.Tensor):
        return "the model makes a dense mask of its own"
    if not query.is_cuda and query.requires_grad:
        return "torch has no backward of flex_attention off CUDA"
    if options.get("dropout"):
        return "flex_attention has no attention dropout"
    return None


def attend_flex(
    layout: PackedLayout,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask | torch.Tensor | None,
    options: Mapping[str, Any],
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend by transformers' flex function with a BlockMask of the packed rows."""
    attention = _original(releases.attention_function("flex_attention"))
    make_mask = _original(masks.mask_function("flex_attention"))
    if isinstance(mask, torch.Tensor):
        raise UnsupportedModel(
            f"{type(module).__name__} hands flex_attention a dense mask of shape {tuple(mask.shape)}; autopack cannot "
            f"make it block-sparse. Load the model with attn_implementation='sdpa' or 'eager'."
        )
    if mask is None:
        mask = _plain_mask(layout, causal, query.device, make_mask)
    block_mask = mask.made_by(make_mask).over_rows
    options = {name: option for name, option in options.items() if name not in LAYOUT_KWARGS}
    bias = options.get("position_bias")
    if isinstance(bias, torch.Tensor) and bias.shape[-1] == layout.max_seqlen != layout.columns:
        options["position_bias"] = _OfDocuments(bias, layout)
    return attention(module, query, key, value, block_mask, **options)


class _OfDocuments:
    """A bias of the longest document (1, heads, tokens, tokens), read at pairs of columns of packed rows."""

    def __init__(self, bias: torch.Tensor, layout: PackedLayout):
        self.bias = bias
        self.start = layout.start_columns
        self.last = bias.shape[-1] - 1

    def __getitem__(self, pair: Any) -> torch.Tensor:
        row, head, query, key = pair
        # Pairs across documents are masked; kept in range, they can be read like any other.
        places = [(column - self.start[row, column]).clamp(0, self.last) for column in (query, key)]
        return self.bias[0, head, places[0], places[1]]


def _original(function: Any) -> Any:
    # The registered function may be autopack's own replacement, which would come back here.
    return getattr(function, "autopack_original", function)


def _plain_mask(layout: PackedLayout, causal: bool, device: torch.device, make_mask: Any) -> DocumentMask:
    arguments = {
        "batch_size": layout.rows,
        "kv_length": layout.columns,
        "kv_offset": 0,
        "mask_function": masks.plain_rule(causal),
        "attention_mask": None,
        "device": device,
        **masks.query_arguments(layout.columns, device),
    }
    return DocumentMask(layout, make_mask, arguments)

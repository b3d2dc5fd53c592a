"""FlexAttention: one BlockMask per kind of layer and forward, made by transformers' own
functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack.attention.call import AttentionCall, Backend, Output
from autopack.attention.document_mask import DocumentMask
from autopack.inspection import masks, releases, torches
from autopack.layout.packed import PackedLayout


def availability() -> tuple[bool, str]:
    """Return (True if FlexAttention can be used here, its module or the reason why not)."""
    missing = torches.without_flex_attention()
    if missing is not None:
        return False, missing
    if not masks.has_mask_interface():
        return False, f"transformers {releases.VERSION} has no mask interface; it came with 4.53"
    if releases.attention_function("flex_attention") is None:
        return False, "transformers has registered no flex_attention"
    if not torch.cuda.is_available():
        return False, "torch has no backward of flex_attention off CUDA"
    return True, "torch.nn.attention.flex_attention"


def attend(call: AttentionCall) -> Output:
    """Attend by transformers' flex function with a BlockMask of the packed rows."""
    if isinstance(call.mask, DocumentMask):
        blocks = call.mask.over_rows
    else:
        if not torches.is_block_mask(call.mask):
            call.refuse_dense_mask("flex_attention")
        rule = getattr(call.mask, "mask_mod", masks.CAUSAL if call.is_causal else None)
        blocks = _blocks_within_documents(call.layout, call.keys, rule)
    return call.original(call.module, *call.states, blocks, **call.options)


def _blocks_within_documents(
    layout: PackedLayout, memory: PackedLayout, own: Callable[..., Any] | None
) -> Any:
    """Return a BlockMask (rows, 1, columns of `layout`, columns of `memory`) within documents.

    `own` is a rule over columns of the rows that holds beside.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    ours, theirs = layout.seq_idx, memory.seq_idx

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        same = ours[b, q] == theirs[b, k]
        return same if own is None else same & own(b, h, q, k)

    def make() -> tuple[Any, Any]:
        """Create the mask; return it with `own`, whose id is the key and which must stay alive."""
        size = layout.rows, None, layout.columns, memory.columns
        return create_block_mask(rule, *size, device=str(layout.device)), own

    return layout.derived(("blocks", memory, id(own)), make)[0]


BACKEND = Backend(
    name="flex",
    attend=attend,
    availability=availability,
)

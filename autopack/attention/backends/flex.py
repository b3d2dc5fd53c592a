"""FlexAttention: one BlockMask per kind of layer and forward, made by transformers' own
functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack.attention.call import AttentionCall, Backend
from autopack.attention.document_mask import DocumentMask
from autopack.inspection import masks, releases, torches
from autopack.layout.packed import PackedLayout


def availability() -> tuple[bool, str]:
    """Return True if the backend can be used here, and the reason if not."""
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


def attend(call: AttentionCall) -> torch.Tensor:
    """Attend by transformers' flex function with a BlockMask of the packed rows."""
    mask: Any = call.mask
    if isinstance(mask, DocumentMask):
        blocks = mask.over_rows
    elif torches.is_block_mask(mask):
        blocks = blocks_within_documents(call.layout, call.layout, mask.mask_mod)
    else:
        call.refuse_dense_mask("flex_attention")
        blocks = blocks_within_documents(call.layout, call.layout, masks.plain_rule(call.is_causal))
    options = dict(call.options)
    bias = options.get("position_bias")
    if isinstance(bias, torch.Tensor) and bias.shape[-1] == call.layout.max_seqlen != call.layout.columns:
        options["position_bias"] = _OfDocuments(bias, call.layout)
    return call.original(call.module, *call.states, blocks, **options)[0]


def blocks_within_documents(
    layout: PackedLayout,
    memory: PackedLayout,
    own: Callable[..., Any] | None = None,
) -> Any:
    """Return a BlockMask (rows, 1, columns of `layout`, columns of `memory`) within documents.

    `own` is a rule over columns of the rows that holds beside.
    """
    ours, theirs = layout.seq_idx, memory.seq_idx

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        same = ours[b, q] == theirs[b, k]
        return same if own is None else same & own(b, h, q, k)

    return _block_mask(layout, ("blocks", memory), own, rule, layout.rows, (layout.columns, memory.columns))


def _block_mask(
    layout: PackedLayout,
    key: tuple[Any, ...],
    own: Any,
    rule: Callable[..., Any],
    rows: int,
    size: tuple[int, int],
) -> Any:
    """Return the BlockMask of a rule made of `own`; built once per layout, `key` and `own`."""
    from torch.nn.attention.flex_attention import create_block_mask

    def make() -> tuple[Any, Any]:
        """Create the mask; return it with `own`, whose id is the key and which must stay alive."""
        return create_block_mask(rule, rows, None, *size, device=str(layout.device)), own

    return layout.derived((*key, id(own)), make)[0]


class _OfDocuments:
    """A bias of the longest document (1, H, L, L), read at pairs of columns of packed rows."""

    def __init__(self, bias: torch.Tensor, layout: PackedLayout):
        self.bias = bias
        self.start = layout.start_columns
        self.last = bias.shape[-1] - 1

    def __getitem__(self, pair: Any) -> torch.Tensor:
        row, head, query, key = pair
        # Pairs across documents are masked; kept in range, they can be read like any other.
        places = [(column - self.start[row, column]).clamp(0, self.last) for column in (query, key)]
        return self.bias[0, head, places[0], places[1]]


BACKEND = Backend(
    name="flex",
    attend=attend,
    availability=availability,
    implementations=lambda: ("flex_attention",) if availability()[0] else (),
    is_own=lambda implementation: implementation == "flex_attention",
)

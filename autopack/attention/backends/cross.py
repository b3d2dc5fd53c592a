"""Cross-attention between packed rows: every document of the decoder reads that document of the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, releases
from autopack.layout.declarations import LAYOUT_KWARGS
from autopack.layout.packed import PackedLayout

__all__ = ["attend_across"]


def attend_across(
    attention: Callable[..., Any],
    implementation: str,
    layout: PackedLayout,
    memory: PackedLayout,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask | torch.Tensor | None,
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attend from (1, heads, tokens, head size) queries of `layout` to the keys and values of `memory`.

    Both have the same number of documents. Returns the output (1, tokens, heads, value head size). FlashAttention and
    FlexAttention are called once, anything else once per document.
    """
    options = {name: option for name, option in options.items() if name not in (*LAYOUT_KWARGS, "position_ids")}
    if isinstance(mask, DocumentMask):
        if mask.pattern != masks.Pattern(causal=False):
            raise UnsupportedModel(
                f"{type(module).__name__} attends to the encoder by a rule of its own, which autopack cannot apply to "
                f"documents. Run such documents one per row."
            )
        mask = None  # all that a document's encoder has made is seen
    options = {name: option for name, option in options.items() if not _is_empty_bias(name, option)}
    if releases.is_flash(implementation):
        _refuse(module, mask, "flash attention")
        told = {
            "cu_seq_lens_q": layout.cu_seqlens,
            "cu_seq_lens_k": memory.cu_seqlens,
            "max_length_q": layout.max_seqlen,
            "max_length_k": memory.max_seqlen,
        }
        return attention(module, query, key, value, None, **told, **{**options, "is_causal": False})[0], None
    if implementation == "flex_attention":
        _refuse(module, mask, "flex_attention")
        return attention(module, query, key, value, _block_mask(layout, memory), **options)[0], None
    outputs = []
    for (first, end), (first_key, end_key) in zip(pairwise(layout.bounds), pairwise(memory.bounds), strict=True):
        keys = slice(None), slice(None), slice(first_key, end_key)
        alone = None if mask is None else _part(mask, slice(first, end), slice(first_key, end_key))
        outputs.append(attention(module, query[:, :, first:end], key[keys], value[keys], alone, **options)[0])
    return torch.cat(outputs, dim=1), None


def _is_empty_bias(name: str, option: Any) -> bool:
    return name == "position_bias" and isinstance(option, torch.Tensor) and option.shape[-1] == 1


def _part(mask: torch.Tensor, queries: slice, keys: slice) -> torch.Tensor:
    return mask[:, :, queries if mask.shape[2] > 1 else slice(None), keys]


def _refuse(module: torch.nn.Module, mask: torch.Tensor | None, kernel: str) -> None:
    if mask is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} hands {kernel} a mask of its own, of shape {tuple(mask.shape)}; autopack cannot "
            f"split it by documents. Load the model with attn_implementation='sdpa' or 'eager'."
        )


def _block_mask(layout: PackedLayout, memory: PackedLayout) -> Any:
    """A BlockMask (1, 1, tokens, states) that lets each document of the decoder see its own of the encoder."""

    def build() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        ours, theirs = layout.seq_idx[0], memory.seq_idx[0]

        def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
            return ours[q] == theirs[k]

        return create_block_mask(same_document, None, None, layout.columns, memory.columns, device=str(layout.device))

    return layout.derived(("across", memory), build)

"""Per-document attention inside the packed row: the model's own attention function, once per document.

Nothing of size rows x columns x columns is made, and nothing needs to be known of the function: scale, grouped-query
heads, softcap, sinks, biases, dropout and whatever else it does come along. This is the path of `sdpa` and `eager`, and
of any attention function that a user has registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopack.attention.document_mask import DocumentMask
from autopack.layout.declarations import LAYOUT_KWARGS
from autopack.layout.packed import PackedLayout

__all__ = ["attend_documents", "slice_mask", "told_causality"]

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def attend_documents(
    attention: Attention,
    layout: PackedLayout,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask | torch.Tensor | None,
    options: Mapping[str, Any],
    want_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend within each document of (rows, heads, columns, head size) states.

    Returns the output (rows, columns, heads, value head size), and the attention weights (rows, heads, columns,
    columns), zero across documents, where they are wanted and the function gives them.
    """
    options = {name: option for name, option in options.items() if name not in LAYOUT_KWARGS}
    if not want_weights and _uniform(layout, mask, options):
        return _attend_uniform(attention, layout, module, query, key, value, mask, options), None
    outputs: list[list[torch.Tensor]] = [[] for _ in range(layout.rows)]
    weights: torch.Tensor | None = None
    for row, first, end in layout.spans:
        here = slice(row, row + 1), slice(None), slice(first, end)
        alone = slice_mask(mask, row, first, end)
        sliced = {name: _slice_option(name, option, layout, row, first, end) for name, option in options.items()}
        told = told_causality(mask, alone, sliced)
        output, weight = attention(module, query[here], key[here], value[here], alone, **told)
        outputs[row].append(output)
        if want_weights and weight is not None:
            if weights is None:
                weights = weight.new_zeros(layout.rows, weight.shape[1], layout.columns, layout.columns)
            weights[row, :, first:end, first:end] = weight[0]
    return torch.cat([torch.cat(row, dim=1) for row in outputs]), weights


def slice_mask(mask: DocumentMask | torch.Tensor | None, row: int, first: int, end: int) -> torch.Tensor | None:
    """The mask of one document: made for it, or its diagonal block of a mask that the model made for the row."""
    if isinstance(mask, DocumentMask):
        return mask.for_document(row, first, end)
    if mask is None:
        return None
    batch = slice(row, row + 1) if mask.shape[0] > 1 else slice(None)
    queries = slice(first, end) if mask.shape[-2] > 1 else slice(None)  # one for all queries says what padding is
    return mask[batch, :, queries, first:end]


def told_causality(
    mask: DocumentMask | torch.Tensor | None, alone: torch.Tensor | None, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options with `is_causal` as the model would have said it for the document's own mask.

    gpt2 and others conclude from the presence of a mask that the call need not be causal (up to 4.57); the description
    of a mask is present even where a document alone would have had none.
    """
    if options.get("is_causal") is None or not isinstance(mask, DocumentMask):
        return options
    return {**options, "is_causal": alone is None and mask.causal}


def _slice_option(name: str, option: Any, layout: PackedLayout, row: int, first: int, end: int) -> Any:
    if not isinstance(option, torch.Tensor) or option.dim() < 2:
        return option
    columns = layout.columns
    if name == "position_bias" and option.shape[-1] == layout.max_seqlen != columns:
        return option[..., : end - first, : end - first]  # that of the longest document
    if option.dim() == 4 and option.shape[-2:] == (columns, columns):
        batch = slice(row, row + 1) if option.shape[0] == layout.rows > 1 else slice(None)
        return option[batch, :, first:end, first:end]
    if option.dim() == 4 and option.shape[2] == columns != option.shape[1]:  # of each head and query: sinks, gates
        batch = slice(row, row + 1) if option.shape[0] == layout.rows > 1 else slice(None)
        return option[batch, :, first:end]
    if option.shape[1] == columns and option.shape[0] in (1, layout.rows):
        batch = slice(row, row + 1) if option.shape[0] > 1 else slice(None)
        return option[batch, first:end]
    return option


def _uniform(layout: PackedLayout, mask: DocumentMask | torch.Tensor | None, options: Mapping[str, Any]) -> bool:
    if layout.uniform_length is None or isinstance(mask, torch.Tensor) or (mask is not None and mask.absolute):
        return False
    return not any(isinstance(option, torch.Tensor) and option.dim() >= 2 for option in options.values())


def _attend_uniform(
    attention: Attention,
    layout: PackedLayout,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask | torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Equally long documents are a batch: one call."""
    length = layout.lengths[0]

    def as_batch(states: torch.Tensor) -> torch.Tensor:
        heads, size = states.shape[1], states.shape[3]
        return states.transpose(1, 2).reshape(-1, length, heads, size).transpose(1, 2)

    alone = mask.for_document(0, 0, length) if isinstance(mask, DocumentMask) else None
    told = told_causality(mask, alone, options)
    output, _ = attention(module, as_batch(query), as_batch(key), as_batch(value), alone, **told)
    return output.reshape(layout.rows, layout.columns, *output.shape[2:])

"""Attention across to images: every document reads its own, as it would alone; one that has none gets zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopack.attention.call import Output
from autopack.attention.per_document import slice_mask
from autopack.errors import UnsupportedModel
from autopack.layout.seen_images import SeenImages


@torch._dynamo.disable  # places on the host would be constants of a graph
def attend(
    function: Callable[..., Any],
    module: torch.nn.Module,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    options: Mapping[str, Any],
    seen: SeenImages,
) -> Output:
    """Attend by `function` from the documents of the rows to the states of their own images.

    `states` are queries (rows, heads, columns, channels), keys and values (rows, heads, images * n, channels); `mask`
    is None or (rows, 1, columns, images * n). A token that sees none of its document's images sees, upstream, all of
    them: only by this are those of other documents no part of that. Gives no attention weights.
    """
    query, key, value = states
    rows, heads, columns, _ = query.shape
    each, rest = divmod(key.shape[2], seen.count)
    if rest or rows != 1 + seen.documents[-1][0] or columns != seen.documents[-1][2]:
        raise UnsupportedModel(
            f"{type(module).__name__} attends to images from {rows} rows of {columns} tokens to {key.shape[2]} states "
            f"of {seen.count} images, and autopack does not know which are whose. Run the documents one per row."
        )
    outputs = []
    for (row, first, end), (begin, stop) in zip(seen.documents, seen.images, strict=True):
        if begin == stop:
            outputs.append(query.new_zeros(1, end - first, heads, value.shape[3]))
            continue
        here, queries, keys = slice(row, row + 1), slice(first, end), slice(begin * each, stop * each)
        own = query[here, :, queries], key[here, :, keys], value[here, :, keys]
        outputs.append(function(module, *own, slice_mask(mask, row, queries, keys), **options)[0])
    tokens = torch.cat(outputs, dim=1)
    return tokens.reshape(rows, columns, *tokens.shape[2:]), None

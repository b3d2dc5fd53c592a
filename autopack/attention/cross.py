"""Attention to states beside the rows: every document reads its own encoder states, or its own
images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import torch

from autopack.attention.call import AttentionCall, Output, slice_mask
from autopack.attention.choose import BACKENDS, own_backend
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import masks
from autopack.layout.prepared import SeenImages


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def attend(call: AttentionCall) -> Output:
    """Attend from the documents of `call.layout`, one row, to as many documents of `call.memory`.

    FlashAttention and FlexAttention are called once, anything else once per document. Returns no
    attention weights.
    """
    layout, memory, mask = call.layout, call.keys, call.mask
    if isinstance(mask, DocumentMask):
        if mask.pattern != masks.Pattern(causal=False) and not mask.sees_all(layout, memory):
            raise UnsupportedModel(
                f"{type(call.module).__name__} attends to the encoder by a rule of its own, which "
                "autopack cannot apply to documents. Run such documents one per row.",
                code="attention-unknown",
            )
        mask = None  # all that a document's encoder has made is seen
    # Left out: positions, which are those of the decoder alone, and a bias of one element for all
    # pairs.
    options = {name: option for name, option in call.options.items() if name != "position_ids"}
    bias = options.get("position_bias")
    if isinstance(bias, torch.Tensor) and bias.shape[-1] == 1:
        del options["position_bias"]
    own = own_backend(call.implementation)
    if own in ("flash", "flex"):
        options["is_causal"] = False
        return BACKENDS[own].attend(replace(call, mask=mask, options=options))[0], None
    pairs = zip(pairwise(layout.bounds), pairwise(memory.bounds), strict=True)
    places = ((0, slice(*ours), slice(*theirs)) for ours, theirs in pairs)
    return _one_by_one(replace(call, mask=mask, options=options), places), None


@torch._dynamo.disable  # places on the host would be constants of a graph
def attend_to_images(call: AttentionCall, seen: SeenImages | None) -> Output:
    """Attend from documents to the states of their own images; zeros if one has none.

    Queries are (R, H, C, E), keys and values (R, H, images * n, E); the mask is None or (R, 1, C,
    images * n). Upstream, a token that sees none of its document's images sees all images of
    the call; here it sees no other document's. Returns no attention weights.
    """
    if seen is None:
        raise UnsupportedModel(
            f"{type(call.module).__name__} attends to images inside a packed forward whose call "
            "does not say which document sees which. Run the documents one per row.",
            code="media-mixed",
        )
    query, key, _ = call.states
    rows, _, columns, _ = query.shape
    each, rest = divmod(key.shape[2], seen.count)
    if rest or rows != 1 + seen.documents[-1][0] or columns != seen.documents[-1][2]:
        raise UnsupportedModel(
            f"{type(call.module).__name__} attends to images from {rows} rows of {columns} tokens "
            f"to {key.shape[2]} states of {seen.count} images, and autopack does not know which "
            "are whose. Run the documents one per row.",
            code="media-mixed",
        )
    pairs = zip(seen.documents, seen.images, strict=True)
    places = (
        (row, slice(*own), slice(begin * each, stop * each)) for (row, *own), (begin, stop) in pairs
    )
    tokens = _one_by_one(call, places)
    return tokens.reshape(rows, columns, *tokens.shape[2:]), None


def _one_by_one(call: AttentionCall, places: Iterable[tuple[int, slice, slice]]) -> torch.Tensor:
    """Attend once per document, from queries to keys of its row in `places`: (1, tokens, H, V)."""
    query, key, value = call.states
    outputs = []
    for row, queries, keys in places:
        here = slice(row, row + 1)
        if keys.start == keys.stop:
            zeros = query.new_zeros(1, queries.stop - queries.start, query.shape[1], value.shape[3])
            outputs.append(zeros)
            continue
        own = query[here, :, queries], key[here, :, keys], value[here, :, keys]
        assert not isinstance(call.mask, DocumentMask)
        mask = slice_mask(call.mask, row, queries, keys)
        outputs.append(call.original(call.module, *own, mask, **call.options)[0])
    return torch.cat(outputs, dim=1)

"""Attention to other states than the row's own: every document reads its own encoder states or its
own images, and in a row that holds common beginnings once, each stretch reads its document.

Shapes: S tokens of the row that runs, else as in `autopack.attention.call`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopack.attention.call import AttentionCall, Backend, Output, slice_mask
from autopack.attention.choose import BACKENDS, own_backend
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import masks
from autopack.layout.prefixes import Prefixes
from autopack.layout.prepared import SeenImages


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def attend(call: AttentionCall) -> Output:
    """Return (output, None): each document of `call.layout` attends to its own of `call.memory`.

    The layout is one row. FlashAttention and FlexAttention are called once, anything else once per
    document. Raises `UnsupportedModel` for a mask that hides states of the encoder.
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
    if isinstance(bias, Tensor) and bias.shape[-1] == 1:
        del options["position_bias"]
    own = own_backend(call.implementation)
    if own in ("flash", "flex"):
        options["is_causal"] = False
        return BACKENDS[own].attend(replace(call, mask=mask, options=options))[0], None
    pairs = zip(pairwise(layout.bounds), pairwise(memory.bounds), strict=True)
    places = ((0, slice(*ours), slice(*theirs)) for ours, theirs in pairs)
    return _attend_at(replace(call, mask=mask, options=options), places), None


@torch._dynamo.disable  # places on the host would be constants of a graph
def attend_to_images(call: AttentionCall, seen: SeenImages | None) -> Output:
    """Return (output, None): documents attend to their own images; zeros for one without images.

    Queries are (R, H, C, E), keys and values (R, H, images * n, E); the mask is None or (R, 1, C,
    images * n). Upstream, a token that sees none of its document's images sees all images of the
    call; here it sees no other document's. Raises `UnsupportedModel` if `seen` is None or of other
    shapes.
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
    tokens = _attend_at(call, places)
    return tokens.reshape(rows, columns, *tokens.shape[2:]), None


def _attend_at(call: AttentionCall, places: Iterable[tuple[int, slice, slice]]) -> Tensor:
    """Return outputs (1, tokens, H, V) of a call per (row, queries, keys) of `places`, joined."""
    query, key, value = call.states
    outputs = []
    for row, queries, keys in places:
        here = slice(row, row + 1)
        if keys.start == keys.stop:
            zeros = query.new_zeros(1, queries.stop - queries.start, query.shape[1], value.shape[3])
            outputs.append(zeros)
            continue
        own = query[here, :, queries], key[here, :, keys], value[here, :, keys]
        mask = slice_mask(call.mask, row, queries, keys)
        outputs.append(call.original(call.module, *own, mask, **call.options)[0])
    return torch.cat(outputs, dim=1)


def attend_over_prefixes(call: AttentionCall, prefixes: Prefixes, backend: Backend) -> Tensor:
    """Return attention (1, S, H, V) of every token in a row of stretches to its document so far.

    The layout of `call` describes the documents. A backend that takes other lengths of keys than of
    queries computes each stretch once; with any other backend, documents attend as if they shared
    nothing. Raises `UnsupportedModel` if later tokens are seen: then common tokens differ from
    document to document.
    """
    if call.pattern is None or not call.pattern.causal:
        raise UnsupportedModel(
            f"{type(call.module).__name__} attends by a mask that is not known to hide later "
            "tokens, so what rows of the batch begin with cannot be computed once for all of them. "
            "Use autopack.enable(model, share=False).",
            code="share-refused",
        )
    given = (option for name, option in call.options.items() if name != "position_ids")
    of_tokens = any(isinstance(option, Tensor) and option.dim() > 1 for option in given)
    found = (
        None
        if backend.over_prefixes is None or of_tokens
        else backend.over_prefixes(call, prefixes)
    )
    return _as_documents(call, prefixes, backend) if found is None else found


def _as_documents(call: AttentionCall, prefixes: Prefixes, backend: Backend) -> Tensor:
    """Return the row's tokens (1, S, H, V) of attention over whole documents, nothing shared."""
    places = prefixes.row.back.to(call.query.device)
    query, key, value = (states.index_select(2, places) for states in call.states)
    options = {
        name: _expanded(call, name, option, prefixes) for name, option in call.options.items()
    }
    call = replace(call, query=query, key=key, value=value, options=options)
    return backend.attend(call)[0].index_select(1, prefixes.row.where[0].to(query.device))


def _expanded(call: AttentionCall, name: str, option: Any, prefixes: Prefixes) -> Any:
    """Return an option with its axis of S tokens, if any, expanded; raise if axes are unclear."""
    shape = option.shape if isinstance(option, Tensor) else ()
    axes = [axis for axis, size in enumerate(shape) if axis and size == prefixes.tokens]
    if not axes:
        return option
    if len(axes) > 1 or (axes[0] == 1 and option.shape[1] == call.query.shape[1]):
        raise UnsupportedModel(
            f"{type(call.module).__name__} hands {name} of shape {tuple(option.shape)} to its "
            f"attention function, for a row of {prefixes.tokens} tokens that holds once what rows "
            "of the batch begin with; autopack cannot tell what of it is of which document. Use "
            "autopack.enable(model, share=False).",
            code="share-refused",
        )
    return option.index_select(axes[0], prefixes.row.back.to(option.device))

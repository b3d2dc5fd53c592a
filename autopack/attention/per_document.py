"""Per-document attention inside the packed row: the model's own attention function, once per
document.

Nothing of size rows x columns x columns is made, and nothing needs to be known of the function:
scale, grouped-query heads, softcap, sinks, biases, dropout and all else come along. This is the
path of `sdpa` and `eager`, and of any attention function that the user registered.
"""

from __future__ import annotations

from typing import Any

import torch

from autopack.attention.call import AttentionCall, Output
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection.foreign import is_of_library
from autopack.layout.packed import PackedLayout
from autopack.layout.token_map import Batches, equally_long

_MANY, _SHORT = 4, 10
"""Documents of each length, and tokens of each document, by mean, from and up to which documents of
several lengths are moved next to those of their length.

A step of 802 documents of 2 to 8 tokens was 1.09 times as fast for it with 256 channels, and 1.17
times with 128, on a single thread of a CPU; with 8 to 16 tokens it was no faster.
"""


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def attend(call: AttentionCall) -> Output:
    """Attend within each document; return weights too, if wanted and if the function gives them."""
    layout = call.layout
    if (
        not call.want_weights
        and (groups := _batches_by_length(layout)) is not None
        and _can_be_batched(call)
    ):
        return _attend_as_batches(call, groups), None
    outputs: list[torch.Tensor] = []
    weights: torch.Tensor | None = None
    states = [_by_document(each, layout) for each in (call.query, call.key, call.value)]
    with_axes = [
        name
        for name, option in call.options.items()
        if isinstance(option, torch.Tensor) and option.dim() > 1
    ]
    for (row, first, end), query, key, value in zip(layout.spans, *states, strict=True):
        if isinstance(call.mask, DocumentMask):
            mask = call.mask.for_document(row, first, end)
        else:
            mask = slice_mask(call.mask, row, slice(first, end), slice(first, end))
        options = dict(call.options_beside(mask))
        for name in with_axes:
            options[name] = _slice_option(call, name, options[name], row, first, end)
        output, weight = call.original(call.module, query, key, value, mask, **options)
        outputs.append(output)
        if call.want_weights and weight is not None:
            if weights is None:
                weights = weight.new_zeros(
                    layout.rows, weight.shape[1], layout.columns, layout.columns
                )
            weights[row, :, first:end, first:end] = weight[0]
    tokens = torch.cat(outputs, dim=1)
    return tokens.reshape(layout.rows, layout.columns, *tokens.shape[2:]), weights


def _by_document(states: torch.Tensor, layout: PackedLayout) -> list[torch.Tensor]:
    """Return states (R, H, C, E) cut into documents, each (1, H, L, E).

    They are cut by `split`, whose backward puts the parts together at once; a backward of slices
    adds up a whole row for every document. A single row is not split off from others, which would
    copy it once more on the way back.
    """
    rows = states.split(1) if layout.rows > 1 else (states,)
    found: list[torch.Tensor] = []
    for row, lengths in zip(rows, layout.lengths_by_row, strict=True):
        found += row.split(lengths, dim=2)
    return found


def slice_mask(
    mask: torch.Tensor | None, row: int, queries: slice, keys: slice
) -> torch.Tensor | None:
    """Return one document's part of a mask (R or 1, H or 1, queries or 1, keys) that the model
    made."""
    if mask is None:
        return None
    rows = slice(row, row + 1) if mask.shape[0] > 1 else slice(None)
    return mask[rows, :, queries if mask.shape[2] > 1 else slice(None), keys]


def _slice_option(
    call: AttentionCall,
    name: str,
    option: torch.Tensor,
    row: int,
    first: int,
    end: int,
) -> torch.Tensor:
    """Return an option for one document; an option without an axis of columns is the same for
    all."""
    rows, columns = call.layout.rows, call.layout.columns
    if name == "position_bias" and option.shape[-1] == call.layout.max_seqlen != columns:
        return option[..., : end - first, : end - first]  # that of the longest document
    own = option[row : row + 1] if option.shape[0] == rows > 1 else option
    if option.dim() == 4 and option.shape[-2:] == (columns, columns):
        return own[:, :, first:end, first:end]
    # sinks, gates
    if option.dim() == 4 and option.shape[2] == columns and _has_heads(call, name, option):
        return own[:, :, first:end]
    if option.shape[1] == columns and option.shape[0] in (1, rows):
        return own[:, first:end]
    return option


def _has_heads(call: AttentionCall, name: str, option: torch.Tensor) -> bool:
    """Return True if the second axis of an option is its heads, as it is for states.

    The third axis of the option is as long as a row.
    In transformers' own attention that is so whenever the second axis is as long as there are
    heads. Raises `UnsupportedModel` if third-party code could mean the columns by it.
    """
    columns, length = call.layout.columns, option.shape[1]
    if length == columns == call.query.shape[1] and not is_of_library(type(call.module)):
        raise UnsupportedModel(
            f"{type(call.module).__name__} hands {name} of shape {tuple(option.shape)} to its "
            f"attention function for a row of {columns} tokens, and has {length} heads: autopack "
            "cannot tell heads from tokens. Add a token of padding to the row.",
            code="attention-unknown",
        )
    return length in (1, call.query.shape[1]) or length != columns


def _can_be_batched(call: AttentionCall) -> bool:
    """Return True if documents can run as batches: only states and options per column are cut."""
    layout = call.layout
    of_columns = (1, layout.columns), (layout.rows, layout.columns)
    return (
        call.mask is None or (isinstance(call.mask, DocumentMask) and not call.mask.absolute)
    ) and all(
        not _has_axes(option) or option.shape in of_columns for option in call.options.values()
    )


def _batches_by_length(layout: PackedLayout) -> Batches | None:
    """Return batches of documents of one length; None if moving tokens costs more than calls.

    Documents of a single length lie as in a batch already.
    """
    documents, kinds = len(layout.lengths), len(set(layout.lengths))
    is_worth_it = documents >= _MANY * kinds and layout.bounds[-1] <= _SHORT * documents
    return Batches.grouped(layout, equally_long) if kinds == 1 or is_worth_it else None


def _has_axes(option: Any) -> bool:
    """Return True for a tensor of two or more axes, which has to be cut by documents."""
    return isinstance(option, torch.Tensor) and option.dim() >= 2


def _attend_as_batches(call: AttentionCall, groups: Batches) -> torch.Tensor:
    """Attend once for each length, with the documents of that length as a batch."""
    maps = groups.maps
    order = call.layout.derived(
        "order by length",
        lambda: torch.cat([each.where.reshape(-1) for each in maps]),
    )

    def batches(tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return (R, C, ...) as (documents, L, ...) for each length."""
        flat = tokens.flatten(0, 1)
        ordered = flat if len(maps) == 1 else flat.index_select(0, order)
        parts = ordered.split([each.sources.size for each in maps])
        return [part.unflatten(0, each.into) for part, each in zip(parts, maps, strict=True)]

    states = [batches(each.transpose(1, 2)) for each in call.states]
    columns = {
        name: batches(option.expand(call.layout.rows, -1))
        for name, option in call.options.items()
        if _has_axes(option)
    }
    outputs = []
    for number, batch in enumerate(maps):
        mask = (
            call.mask.for_document(0, 0, batch.into[1])
            if isinstance(call.mask, DocumentMask)
            else None
        )
        options = {
            **call.options_beside(mask),
            **{name: parts[number] for name, parts in columns.items()},
        }
        output, _ = call.original(
            call.module,
            *(each[number].transpose(1, 2) for each in states),
            mask,
            **options,
        )
        outputs.append(output.flatten(0, 1))
    if len(maps) == 1:
        return outputs[0].unflatten(0, groups.shape)
    return torch.cat(outputs).index_select(0, groups.back).unflatten(0, groups.shape)

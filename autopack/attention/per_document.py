"""Per-document attention inside the packed row: the model's own attention function, once per
document.

Nothing of size rows x columns x columns is made, and nothing needs to be known of the function:
scale, grouped-query heads, softcap, sinks, biases, dropout and all else come along. This is the
path of `sdpa` and `eager`, and of any attention function that the user registered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopack.attention import prefixes
from autopack.attention.call import AttentionCall, Backend, Output
from autopack.attention.compiled import attend_compiled
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection.foreign import is_of_library
from autopack.layout.packed import PackedLayout
from autopack.layout.token_map import Batches, equally_long

_MANY, _SHORT = 4, 10
"""Least documents of each length, and most tokens of each document, by mean, for documents of
several lengths to be moved next to others of their length.

A step of 802 documents of 2 to 8 tokens was 1.09 times as fast for it with 256 channels, and 1.17
times with 128, on a single thread of a CPU; with 8 to 16 tokens it was no faster.
"""


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def attend(call: AttentionCall) -> Output:
    """Attend by the model's own function, once per document; return weights if they are wanted."""
    layout, weights = call.layout, None
    groups = _batches_by_length(call)
    if groups is None:
        batches = layout.spans
        states = [_by_document(each, layout) for each in call.states]
    else:
        batches = tuple((0, 0, each.into[1]) for each in groups.maps)
        states = [
            [
                each.transpose(1, 2)
                for each in _grouped_by_length(each.transpose(1, 2), layout, groups)
            ]
            for each in call.states
        ]
    options: dict[str, Sequence[Tensor]] = {}
    for name, option in call.options.items():
        if isinstance(option, Tensor) and option.dim() > 1:
            options[name] = (
                [_slice_option(call, name, option, *place) for place in batches]
                if groups is None
                else _grouped_by_length(option.expand(layout.rows, -1), layout, groups)
            )
    outputs: list[Tensor] = []
    for number, (place, query, key, value) in enumerate(zip(batches, *states, strict=True)):
        row, first, end = place
        if isinstance(call.mask, DocumentMask):
            mask = call.mask.for_document(row, first, end)
        else:
            mask = slice_mask(call.mask, row, slice(first, end), slice(first, end))
        given = dict(call.options_beside(mask))
        for name, parts in options.items():
            given[name] = parts[number]
        output, weight = call.original(call.module, query, key, value, mask, **given)
        outputs.append(output.flatten(0, 1))
        if call.want_weights and weight is not None:
            if weights is None:
                weights = weight.new_zeros(
                    layout.rows, weight.shape[1], layout.columns, layout.columns
                )
            weights[row, :, first:end, first:end] = weight[0]
    found = torch.cat(outputs)
    if groups is not None and len(batches) > 1:
        found = found.index_select(0, groups.back)
    return found.unflatten(0, (layout.rows, layout.columns)), weights


def _by_document(states: Tensor, layout: PackedLayout) -> Sequence[Tensor]:
    """Return states (R, H, C, E) split into one (1, H, L, E) per document.

    They are cut by `split`, whose backward puts the parts together at once; a backward of slices
    adds up a whole row for every document. A single row is not split off from others, which would
    copy it once more on the way back.
    """
    rows = states.split(1) if layout.rows > 1 else (states,)
    found: list[Tensor] = []
    for row, lengths in zip(rows, layout.lengths_by_row, strict=True):
        found += row.split(lengths, dim=2)
    return found


def _grouped_by_length(tokens: Tensor, layout: PackedLayout, groups: Batches) -> Sequence[Tensor]:
    """Return tokens (R, C, ...) as one (documents, L, ...) per length of documents."""
    flat, maps = tokens.flatten(0, 1), groups.maps
    if len(maps) > 1:
        places = layout.derived(
            "order by length", lambda: torch.cat([each.where.reshape(-1) for each in maps])
        )
        flat = flat.index_select(0, places)
    parts = flat.split([each.sources.size for each in maps])
    return [part.unflatten(0, each.into) for part, each in zip(parts, maps, strict=True)]


def slice_mask(mask: Tensor | None, row: int, queries: slice, keys: slice) -> Tensor | None:
    """Return one document's part of a mask (R or 1, H or 1, queries or 1, keys), or None."""
    if mask is None:
        return None
    rows = slice(row, row + 1) if mask.shape[0] > 1 else slice(None)
    return mask[rows, :, queries if mask.shape[2] > 1 else slice(None), keys]


def _slice_option(
    call: AttentionCall,
    name: str,
    option: Tensor,
    row: int,
    first: int,
    end: int,
) -> Tensor:
    """Return an option's part for one document, or the option if it has no axis of columns."""
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


def _has_heads(call: AttentionCall, name: str, option: Tensor) -> bool:
    """Return True if an option's second axis is its heads, so that its third is the columns.

    The third axis of the option is as long as a row. In transformers' own attention, the second
    axis is the heads whenever it is as long as there are heads. Raises `UnsupportedModel` if
    third-party code could mean the columns by it.
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


def _batches_by_length(call: AttentionCall) -> Batches | None:
    """Return batches of documents of one length, or None if each is to be cut out singly.

    Documents are cut out singly where more is cut than states and options per column, or moving
    tokens costs more than calls. Documents of a single length lie as in a batch already.
    """
    layout = call.layout
    documents, kinds = len(layout.lengths), len(set(layout.lengths))
    is_worth_it = documents >= _MANY * kinds and layout.bounds[-1] <= _SHORT * documents
    of_columns = (1, layout.columns), (layout.rows, layout.columns)
    alike = call.mask is None or (isinstance(call.mask, DocumentMask) and not call.mask.absolute)
    if not (kinds == 1 or is_worth_it) or call.want_weights or not alike:
        return None
    for option in call.options.values():
        has_axes = isinstance(option, Tensor) and option.dim() > 1
        if has_axes and option.shape not in of_columns:
            return None
    return Batches.grouped(layout, equally_long)


def _attend_by_sdpa(call: AttentionCall) -> Output:
    """Attend within each document, per document or in compiled code by one operator."""
    pattern, options = call.pattern if torch.compiler.is_compiling() else None, call.options
    given = options.get("dropout") or options.get("position_bias") is not None
    if pattern is None or pattern.chunk is not None or call.replaces_sdpa or given:
        return attend(call)
    bounds, scaling = call.layout.slots_on_host, options.get("scaling")
    return attend_compiled(bounds, *call.states_for_sdpa(), pattern, scaling), None


EAGER = Backend(
    name="eager",
    attend=attend,
    over_prefixes=prefixes.by_stretches,
    availability=lambda: (True, "the model's own attention function"),
)
SDPA = Backend(
    name="sdpa",
    attend=_attend_by_sdpa,
    over_prefixes=prefixes.by_stretches,
    availability=lambda: (True, "torch.nn.functional.scaled_dot_product_attention"),
)

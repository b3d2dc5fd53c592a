"""Per-document attention inside the packed row: the model's own attention function, once per
document.

Nothing of size rows x columns x columns is made, and nothing needs to be known of the function:
scale, grouped-query heads, softcap, sinks, biases, dropout and all else come along. This is the
path of `sdpa` and `eager`, and of any attention function that the user registered.
"""

from __future__ import annotations

import torch

from autopack.attention.call import AttentionCall, Output
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection.foreign import is_of_library
from autopack.layout.packed import PackedLayout


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def attend(call: AttentionCall) -> Output:
    """Attend within each document; return weights too, if wanted and if the function gives them."""
    layout = call.layout
    outputs: list[torch.Tensor] = []
    weights: torch.Tensor | None = None
    states = [_by_document(each, layout) for each in (call.query, call.key, call.value)]
    with_axes = [name for name, option in call.options.items() if isinstance(option, torch.Tensor) and option.dim() > 1]
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
                weights = weight.new_zeros(layout.rows, weight.shape[1], layout.columns, layout.columns)
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


def slice_mask(mask: torch.Tensor | None, row: int, queries: slice, keys: slice) -> torch.Tensor | None:
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
    if option.dim() == 4 and option.shape[2] == columns and _has_heads(call, name, option):  # sinks, gates
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

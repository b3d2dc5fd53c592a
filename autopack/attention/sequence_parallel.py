"""Attention over rows that several ranks share: tokens of all ranks and some heads, for some tokens and all heads.

Attention needs every token of a document, and nothing of other heads. So ranks exchange: each gets whole rows of its
share of the heads, attends within documents as one process would, and hands the tokens of the others back. The method
is that of DeepSpeed-Ulysses (arXiv 2309.14509). Where heads cannot be told apart, or ranks cannot share them equally,
each gets whole rows of all heads, attends as one process would, and keeps its part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopack.attention.call import AttentionCall
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.layout.packed import PackedLayout
from autopack.runtime.row_group import RowGroup

_OF_PARTS = ("position_ids", "cache_position", "shift_labels")
"""Options of the columns of a part that models hand on, and that no attention function needs for documents."""


def with_whole_rows(call: AttentionCall, rows: RowGroup) -> AttentionCall:
    """The same call for whole rows and this rank's share of the heads, or all heads where they cannot be shared out.

    Raises `UnsupportedModel` where an option may be of single columns.
    """
    module, heads = call.module, call.query.shape[1]
    options = {name: option for name, option in call.options.items() if name not in _OF_PARTS}
    given = {name: option for name, option in options.items() if isinstance(option, torch.Tensor) and option.dim()}
    tensors = [name for name, option in given.items() if option.shape != (heads,)]  # sinks have one for each head
    all_heads = bool(given) or bool(heads % rows.ranks or call.key.shape[1] % rows.ranks)
    tensors += ["a mask of its own"] if call.mask is not None and not isinstance(call.mask, DocumentMask) else []
    if tensors:
        raise UnsupportedModel(
            f"{type(module).__name__} hands its attention function {tensors[0]}, which may be of the tokens of a part, "
            f"so it cannot attend over rows that ranks share. Train it without sequence_parallel."
        )
    states = call.query, call.key, call.value
    query, key, value = (rows.whole(each, 2) if all_heads else _whole_rows(each, rows) for each in states)
    return replace(call, query=query, key=key, value=value, options=options)


def parts_of_rows(output: torch.Tensor, call: AttentionCall, rows: RowGroup, heads: int) -> torch.Tensor:
    """The part of the output that this rank has, of all `heads`: (rows, columns, heads, size).

    `output` is (rows, columns of whole rows, heads of this rank, size), what `call` gave.
    """
    if output.shape[:3] != (call.layout.rows, call.layout.columns, call.query.shape[1]):
        raise UnsupportedModel(
            f"the attention function of {type(call.module).__name__} gave {tuple(output.shape)} for whole rows of "
            f"{call.query.shape[1]} heads, so it does not treat heads alike. Train it without sequence_parallel."
        )
    if output.shape[2] == heads:
        return rows.part(output, 1)
    parts = output.unflatten(1, (rows.ranks, -1)).movedim(1, 0)
    return rows.exchange(parts).movedim(0, 2).flatten(2, 3)


def check_shapes(module: nn.Module, layout: PackedLayout, rows: RowGroup, *states: torch.Tensor) -> None:
    """Raise `UnsupportedModel` where queries and keys are not those of this rank's part of the rows of `layout`."""
    wanted = (layout.rows, layout.columns // rows.ranks)
    for each in states:
        if (each.shape[0], each.shape[2]) != wanted:
            raise UnsupportedModel(
                f"{type(module).__name__} attends over {each.shape[2]} tokens in {len(each)} rows, but this rank has "
                f"{wanted[1]} columns of {wanted[0]} rows that it shares with others. Train it without "
                f"sequence_parallel."
            )


def _whole_rows(states: torch.Tensor, rows: RowGroup) -> Any:
    """From (rows, heads, columns of a part, size) to (rows, heads of this rank, columns of whole rows, size)."""
    parts = states.unflatten(1, (rows.ranks, -1)).movedim(1, 0)
    return rows.exchange(parts).movedim(0, 2).flatten(2, 3)

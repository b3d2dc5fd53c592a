"""Labels of packed rows: no document predicts the first token of the next."""

from __future__ import annotations

import torch

from autopack.errors import InvalidPacking
from autopack.layout import IGNORED_LABEL
from autopack.layout.packed import PackedLayout


def without_boundaries(
    labels: torch.Tensor, layout: PackedLayout, shifted: bool = False, ignored: int = IGNORED_LABEL
) -> torch.Tensor:
    """Labels of packed rows for a loss that shifts, without those that a document alone would not be compared with.

    `labels` have one for each token: (rows, columns), (tokens,) or the like, or (rows, columns, codebooks). The first
    one of each document is ignored; of `shifted` labels, which stand at the token that predicts them, the last one.
    `ignored` is the label that the loss leaves out.
    Raises `InvalidPacking` for labels of a shape of which it is not known what in them belongs to which token.
    """
    shape, tokens = (layout.rows, layout.columns), layout.rows * layout.columns
    if tuple(labels.shape[:2]) == shape:
        flat = labels.reshape(tokens, *labels.shape[2:])
    elif labels.numel() == tokens and labels.shape[-1] in (tokens, layout.columns):
        flat = labels.reshape(tokens)
    else:
        raise InvalidPacking(
            f"labels must have one for each token of the packed rows, {shape}; found {tuple(labels.shape)}, in which "
            f"autopack cannot tell where documents begin"
        )
    bounds = layout.cu_seqlens.long()
    at = bounds[1:] - 1 if shifted else bounds[:-1]
    return flat.index_fill(0, at.to(labels.device), ignored).reshape(labels.shape)

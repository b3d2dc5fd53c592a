"""The general way: documents as right-padded rows of a batch through the mixer as it is, bucketed by length.

What comes after a document cannot change what a causal mixer gives it, so right padding is harmless, and nothing has to
be known of the mixer. Scans in Python take as many steps as the longest document of a bucket has tokens, not the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autopack.layout import PackedLayout

__all__ = ["buckets", "run_per_document_row"]

GROWTH = 1.5
"""Largest ratio of lengths in one bucket: padding costs at most a third, and few buckets are needed."""


def buckets(layout: PackedLayout) -> list[np.ndarray]:
    """Numbers of the documents of each bucket, the shortest first; in each, lengths are within a factor of `GROWTH`."""
    lengths = np.asarray(layout.lengths)
    order = np.argsort(lengths, kind="stable")
    found: list[np.ndarray] = []
    start = 0
    while start < len(order):
        end = int(np.searchsorted(lengths[order], lengths[order[start]] * GROWTH, side="right"))
        found.append(order[start:end])
        start = end
    return found


def run_per_document_row(
    run: Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], Any],
    layout: PackedLayout,
    hidden: torch.Tensor,
) -> Any:
    """Run a causal mixer on the documents of packed rows.

    `run` takes hidden states (documents, tokens, ...) and a function that brings other tensors of shape (rows, columns,
    ...) into that form. What it returns in that form, alone or in a tuple, comes back as (rows, columns, ...); anything
    else in a tuple is that of the last bucket.
    """
    outputs: list[tuple[Any, ...]] = []
    places = []
    alone = False
    for documents in buckets(layout):
        starts, lengths = layout.bounds[documents], np.diff(layout.bounds)[documents]
        columns = np.arange(lengths.max())
        # Padding repeats the last token: it is finite, and what is made of it is dropped.
        index = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
        real = np.flatnonzero((columns < lengths[:, None]).reshape(-1))
        where, kept = (torch.from_numpy(places).to(hidden.device) for places in (index, real))

        def spread(tensor: torch.Tensor, where: torch.Tensor = where) -> torch.Tensor:
            return tensor.reshape(layout.rows * layout.columns, *tensor.shape[2:])[where]

        output = run(spread(hidden), spread)
        alone = not isinstance(output, tuple)
        parts = (output,) if alone else output
        outputs.append(tuple(_without_padding(part, index.shape, kept) for part in parts))
        places.append(index.reshape(-1)[real])
    back = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable")).to(hidden.device)
    whole = tuple(_together(parts, layout, back) for parts in zip(*outputs, strict=True))
    return whole[0] if alone else whole


class _Tokens:
    """The part of an output that holds something for every token: (tokens, ...)."""

    def __init__(self, values: torch.Tensor):
        self.values = values


def _without_padding(part: Any, shape: tuple[int, ...], kept: torch.Tensor) -> Any:
    if not isinstance(part, torch.Tensor) or tuple(part.shape[:2]) != shape:
        return part
    flat = part.reshape(-1, *part.shape[2:])
    return _Tokens(flat if len(kept) == len(flat) else flat.index_select(0, kept))


def _together(parts: tuple[Any, ...], layout: PackedLayout, back: torch.Tensor) -> Any:
    if not isinstance(parts[0], _Tokens):
        return parts[-1]
    whole = torch.cat([part.values for part in parts]).index_select(0, back)
    return whole.reshape(layout.rows, layout.columns, *whole.shape[1:])

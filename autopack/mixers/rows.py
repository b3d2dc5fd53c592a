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
    ...) into that form; it returns hidden states of that form, alone or first in a tuple.
    """
    flat = hidden.reshape(layout.rows * layout.columns, *hidden.shape[2:])
    pieces, places, rest = [], [], None
    for documents in buckets(layout):
        starts, lengths = layout.bounds[documents], np.diff(layout.bounds)[documents]
        columns = np.arange(lengths.max())
        # Padding repeats the last token: it is finite, and what is made of it is dropped.
        index = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
        real = np.flatnonzero((columns < lengths[:, None]).reshape(-1))
        where = torch.from_numpy(index).to(hidden.device)

        def spread(tensor: torch.Tensor, where: torch.Tensor = where) -> torch.Tensor:
            return tensor.reshape(layout.rows * layout.columns, *tensor.shape[2:])[where]

        output = run(flat[where], spread)
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        kept = first.reshape(-1, *first.shape[2:])
        if len(real) < len(kept):
            kept = kept.index_select(0, torch.from_numpy(real).to(hidden.device))
        pieces.append(kept)
        places.append(index.reshape(-1)[real])
    back = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable")).to(hidden.device)
    whole = torch.cat(pieces).index_select(0, back)
    whole = whole.reshape(layout.rows, layout.columns, *whole.shape[1:])
    return whole if rest is None else (whole, *rest)

"""The way for mixers that look back a known number of tokens: short convolutions, token shifts.

The rows are run as they are. Only the first tokens of a document have been mixed with those of the one before; they
are run again, with nothing before them, and take the place of what came out. The rest has not seen another document.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autopack.layout.batches import Run, piece
from autopack.layout.packed import PackedLayout

__all__ = ["run_and_redo_heads"]


def run_and_redo_heads(run: Run, layout: PackedLayout, reach: int) -> Any:
    """Run a mixer on packed rows, in which no token sees more than `reach` tokens before it.

    What `run` returns in the form (documents, tokens, ...), alone or in a tuple, comes back as (rows, columns, ...);
    anything else in a tuple is that of the whole rows.
    """
    whole = run(_as_it_is)
    inner = np.flatnonzero(layout.bounds[:-1] % layout.columns)  # the first of a row has nothing before it
    if not reach or not len(inner):
        return whole
    heads, tokens = layout.derived(("heads", reach), lambda: _heads(layout, inner, reach))
    redone = run(heads.spread)

    def replaced(part: Any, again: Any) -> Any:
        if not heads.holds(again):
            return part
        flat = part.reshape(layout.rows * layout.columns, *part.shape[2:])
        return flat.index_copy(0, tokens, heads.real(again)).reshape(part.shape)

    if not isinstance(whole, tuple):
        return replaced(whole, redone)
    return tuple(replaced(part, again) for part, again in zip(whole, redone, strict=True))


def _heads(layout: PackedLayout, documents: np.ndarray, reach: int) -> Any:
    heads = piece(layout, documents, reach)
    return heads, layout.upload(heads.tokens)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

"""The two ways that take nothing but a mixer's own forward.

What comes after a document cannot change what a causal mixer gives it. So documents as right-padded rows of a batch,
bucketed by length, are right for every such mixer; scans in Python take as many steps as the longest document of a
bucket has tokens, not the row.

Mixers that look back a known number of tokens (short convolutions, token shifts) are run on the rows as they are. Only
the first tokens of a document have been mixed with those of the one before; they are run again, with nothing before
them, and take the place of what came out. The rest has not seen another document.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopack.layout.batches import Batches, DocumentBatch, Grouping, Run
from autopack.layout.packed import PackedLayout


def run_per_document_row(run: Run, layout: PackedLayout, group: Grouping | None = None) -> Any:
    """Run a causal mixer on the documents of packed rows, bucketed by length or by another grouping.

    What `run` returns in the form (documents, tokens, ...), alone or in a tuple, comes back as (rows, columns, ...);
    anything else in a tuple is that of the last bucket.
    """
    found = Batches.grouped(layout, group)
    return found.together([run(batch.spread) for batch in found.batches])


def run_and_redo_first_tokens(run: Run, layout: PackedLayout, reach: int) -> Any:
    """Run a mixer on packed rows, in which no token sees more than `reach` tokens before it.

    What `run` returns in the form (documents, tokens, ...), alone or in a tuple, comes back as (rows, columns, ...);
    anything else in a tuple is that of the whole rows.
    """
    whole = run(lambda tensor: tensor)
    inner = np.flatnonzero(layout.bounds[:-1] % layout.columns)  # the first of a row has nothing before it
    if not reach or not len(inner):
        return whole
    first = layout.derived(("first tokens", reach), lambda: DocumentBatch.of(layout, inner, reach))
    tokens = layout.derived(("first tokens' places", reach), lambda: layout.upload(first.tokens))
    redone = run(first.spread)

    def replaced(part: Any, again: Any) -> Any:
        if not first.holds(again):
            return part
        flat = part.reshape(layout.rows * layout.columns, *part.shape[2:])
        return flat.index_copy(0, tokens, first.real(again)).reshape(part.shape)

    if not isinstance(whole, tuple):
        return replaced(whole, redone)
    return tuple(replaced(part, again) for part, again in zip(whole, redone, strict=True))

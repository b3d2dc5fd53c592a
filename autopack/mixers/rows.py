"""The general way: documents as right-padded rows of a batch through the mixer as it is, bucketed by length.

What comes after a document cannot change what a causal mixer gives it, so right padding is harmless, and nothing has to
be known of the mixer. Scans in Python take as many steps as the longest document of a bucket has tokens, not the row.
"""

from __future__ import annotations

from typing import Any

from autopack.layout.batches import Batches, Run
from autopack.layout.packed import PackedLayout


def run_per_document_row(run: Run, layout: PackedLayout) -> Any:
    """Run a causal mixer on the documents of packed rows.

    What `run` returns in the form (documents, tokens, ...), alone or in a tuple, comes back as (rows, columns, ...);
    anything else in a tuple is that of the last bucket.
    """
    found = Batches.grouped(layout)
    return found.together([run(batch.spread) for batch in found.batches])

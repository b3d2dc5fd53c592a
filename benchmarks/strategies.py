"""Ways of choosing documents that share a row, for comparison with those of `autopack.packing.plan`.

They are those that "Enhancing Training Efficiency Using Packing with Flash Attention" (arXiv 2407.09105) compares:

* `random`: documents in random order, a new row where the next one does not fit.
* `sorted`: the same from long to short.
* `fixed_length`: all documents end to end, cut every `max_length` tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import autopack
from autopack.packing.lengths import Counts, bounds_of, numbered
from autopack.packing.strategies import permutation


def plan_by(strategy: str, lengths: np.ndarray, max_length: int, seed: int = 0, **options: Any) -> Any:
    """Return a plan by a strategy of this file, or of `autopack.packing.plan`."""
    if strategy == "fixed_length":
        return fixed_length(lengths, max_length, seed)
    if strategy not in ("random", "sorted"):
        return autopack.packing.plan(lengths, max_length, strategy, seed=seed, **options)
    order = permutation(len(lengths), seed, lengths if strategy == "sorted" else None)
    made = autopack.packing.plan(lengths[order], max_length, "sequential", seed=seed, **options)
    return replace(made, documents=order[made.documents], strategy=strategy)


def fixed_length(lengths: np.ndarray, max_length: int, seed: int = 0) -> Any:
    """Return the plan of all documents end to end, cut every `max_length` tokens."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    first, last = starts // max_length, (ends - 1) // max_length
    parts = last - first + 1
    owners = np.repeat(np.arange(len(lengths)), parts)
    rows = numbered(parts) + first[owners]
    begin = np.maximum(rows * max_length, starts[owners])
    taken = np.minimum((rows + 1) * max_length, ends[owners]) - begin
    counts = Counts(len(lengths), int(ends[-1]), split=int((parts > 1).sum()))
    bounds = bounds_of(np.bincount(rows))
    return autopack.packing.Plan(
        owners, begin - starts[owners], taken, bounds, max_length, "fixed_length", seed, counts
    )

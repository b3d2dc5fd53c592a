"""Deal the documents of an optimizer step to ranks and micro-batches, by cost.

A gradient is a sum over documents, so who computes which one, and beside which others, changes
nothing. Longest documents go first, each to the rank with the least to do (LPT, Graham 1969).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import count

import numpy as np

from autopack.packing.strategies import CostModel

Rows = list[list[int]]
"""The micro-batches of a rank, numbers of documents; one without any keeps step with other ranks.
"""


def deal(
    lengths: Sequence[int],
    homes: Sequence[int],
    ranks: int,
    most: int,
    cost: CostModel,
    moves: bool = True,
) -> list[Rows]:
    """Return the micro-batches of every rank: equally many, of at most `most` tokens each.

    `homes` are the ranks that hold the documents, and that run them where none `moves`. A document
    of more tokens is alone in its micro-batch.
    """
    sizes, at = np.asarray(lengths, np.int64), np.asarray(homes, np.int64)
    order = np.argsort(-sizes, kind="stable")
    of_rank = [order[at[order] == rank].tolist() for rank in range(ranks)]
    if moves and ranks > 1:
        of_rank = _at_home(_dealt(cost(sizes), order.tolist(), ranks), at, sizes)
    # A document of more tokens takes one micro-batch, however long it is.
    tokens = max(int(np.minimum(sizes[numbers], most).sum()) for numbers in of_rank)
    for rows in count(max(1, -(-tokens // most))):
        found = [_dealt(sizes, numbers, rows, most) for numbers in of_rank]
        if all(found):
            return found
    raise AssertionError("a document alone always fits")


def _dealt(loads: np.ndarray, numbers: list[int], parts: int, most: float = math.inf) -> Rows:
    """Return `parts` lists of numbers, each put where the sum of `loads` is least.

    Return [] if one does not fit: by it, a sum of several would be over `most`.
    """
    found: Rows = [[] for _ in range(parts)]
    sums = [(0.0, part) for part in range(parts)]
    for number in numbers:
        held, part = sums[0]
        if held and held + loads[number] > most:
            return []
        found[part].append(number)
        heapq.heapreplace(sums, (held + float(loads[number]), part))
    return found


def _at_home(dealt: Rows, homes: np.ndarray, sizes: np.ndarray) -> Rows:
    """Return what is dealt to each rank, with ranks so exchanged that many tokens stay at home."""
    ranks = len(dealt)
    held = np.array([np.bincount(homes[each], sizes[each], ranks) for each in dealt])
    found = dealt[:]
    for _ in range(ranks):
        group, home = divmod(int(held.argmax()), ranks)
        found[home] = dealt[group]
        held[group], held[:, home] = -1, -1
    return found

"""Deal the documents of an optimizer step to ranks and micro-batches, by cost.

A gradient is a sum over documents, so who computes which one, and beside which others, changes
nothing. Longest documents go first, each to the rank with the least to do (LPT, Graham 1969).
"""

from __future__ import annotations

import heapq
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
    longest_first = np.argsort(-sizes, kind="stable").tolist()
    if moves and ranks > 1:
        at = _renumbered(_balanced(cost(sizes), longest_first, ranks), at, sizes, ranks)
    of_rank = [[number for number in longest_first if at[number] == rank] for rank in range(ranks)]
    # A document of more tokens takes one micro-batch, however long it is.
    fewest = max(
        1, *(-(-int(np.minimum(sizes[numbers], most).sum()) // most) for numbers in of_rank)
    )
    for rows in count(fewest):
        found = [_rows(sizes, numbers, rows, most) for numbers in of_rank]
        dealt = [each for each in found if each is not None]
        if len(dealt) == ranks:
            return dealt
    raise AssertionError("a document alone always fits")


def _balanced(costs: np.ndarray, order: list[int], ranks: int) -> np.ndarray:
    """Return a rank for every document, dealt in `order` to the rank with the least cost."""
    found = np.zeros(len(costs), np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    for number in order:
        load, rank = loads[0]
        found[number] = rank
        heapq.heapreplace(loads, (load + float(costs[number]), rank))
    return found


def _renumbered(dealt: np.ndarray, homes: np.ndarray, sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Return the documents' ranks, renumbered so that many tokens stay at their homes."""
    held = np.zeros((ranks, ranks), np.int64)
    np.add.at(held, (dealt, homes), sizes)
    number = np.zeros(ranks, np.int64)
    for _ in range(ranks):
        group, home = divmod(int(held.argmax()), ranks)
        number[group] = home
        held[group], held[:, home] = -1, -1
    return number[dealt]


def _rows(sizes: np.ndarray, numbers: list[int], rows: int, most: int) -> Rows | None:
    """Return `rows` micro-batches of at most `most` tokens; None if a document does not fit."""
    found: Rows = [[] for _ in range(rows)]
    loads = [(0, row) for row in range(rows)]
    for number in numbers:
        load, row = loads[0]
        if load and load + sizes[number] > most:
            return None
        found[row].append(number)
        heapq.heapreplace(loads, (load + int(sizes[number]), row))
    return found

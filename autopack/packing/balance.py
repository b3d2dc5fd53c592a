"""Equal work for all ranks: costs of rows, steps of rows of similar cost, and a complete last
step."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from autopack.inspection.configs import text_config
from autopack.packing.lengths import Pieces, bounds_of, members
from autopack.packing.strategies import permutation

POOLS = 4
"""Largest number of steps, made of the cheapest rows, that `complete` tries to deal out again."""


@dataclass(frozen=True)
class CostModel:
    """Cost of training on a document, `linear * length + quadratic * length ** 2`; a row costs the
    sum.

    The unit is the cost of one token outside attention. In a transformer of hidden size h a token
    takes about 24 h² operations per layer, and a pair of tokens 2 h in causal attention: the ratio
    is 1 / (12 h), and the default is for h = 4096. `CostModel(0, 1)` counts attention alone,
    `CostModel(1, 0)` tokens alone.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: wanted a finite number of at least 0")
        if not self.linear + self.quadratic:
            raise ValueError("linear=0 and quadratic=0: wanted a model in which something costs")

    def __call__(self, lengths: Any) -> np.ndarray:
        """Return the cost of each document, float64, of the shape of `lengths`."""
        lengths = np.asarray(lengths, np.float64)
        return lengths * (self.linear + self.quadratic * lengths)

    def of_rows(self, lengths: np.ndarray, bounds: np.ndarray, squares: np.ndarray | None = None) -> np.ndarray:
        """Return the cost of each row, (rows,) float64; row r holds documents `bounds[r]` to
        `bounds[r + 1]`.

        `squares` are the sums of the squared lengths of each document's sequences, if it has
        several. Sums are of ints, and so the same on every machine: the order of rows of almost
        equal cost depends on it.
        """
        squares = lengths * lengths if squares is None else squares
        tokens, of_pairs = (np.add.reduceat(of, bounds[:-1]) for of in (lengths, squares))
        return self.linear * tokens + self.quadratic * of_pairs

    @classmethod
    def for_model(cls, model: Any) -> CostModel:
        """Return the cost model for the `hidden_size` of a model or config of transformers."""
        config = getattr(model, "config", model)
        config = text_config(config)
        hidden = getattr(config, "hidden_size", None)
        if not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"wanted a model or config with a hidden_size, found {type(model).__name__}")
        return cls(1.0, 1 / (12 * hidden))


def imbalance(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return the time of each complete step's slowest rank over the mean: (steps,) float64 of at
    least 1.

    Rows `s * ranks` to `(s + 1) * ranks` are step s, as in a plan made for so many ranks.
    """
    steps = np.asarray(costs)[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return steps.max(axis=1) / steps.mean(axis=1)


def arrange(costs: np.ndarray, ranks: int, seed: int) -> np.ndarray:
    """Return an order of rows in which every `ranks` rows, one step, are of similar cost.

    Steps, and the rows in each, are in random order. Rows that do not make a complete step are at
    the end.
    """
    rest, rows = np.split(np.argsort(-costs, kind="stable"), [len(costs) % ranks])
    steps = rows.reshape(-1, ranks)[permutation(len(rows) // ranks, seed)]
    within = np.random.PCG64([seed, 1]).random_raw(steps.size).reshape(steps.shape).argsort(axis=1, kind="stable")
    return np.concatenate([np.take_along_axis(steps, within, axis=1).ravel(), rest])


def share(costs: np.ndarray) -> np.ndarray:
    """Return each rank's rows: costs (steps, rounds, ranks) to columns (steps, ranks, rounds).

    Every rank gets one row of each round; the costliest goes to the rank with the least work so
    far.
    """
    steps, rounds, ranks = costs.shape
    columns = np.empty((steps, ranks, rounds), np.int64)
    load = np.zeros((steps, ranks))
    for number in range(rounds):
        of_round = costs[:, number]
        rows = np.argsort(-of_round, axis=1, kind="stable")
        takers = np.argsort(load, axis=1, kind="stable")
        np.put_along_axis(columns[:, :, number], takers, rows, axis=1)
        load += np.take_along_axis(of_round, columns[:, :, number], axis=1)
    return columns


def complete(
    pieces: Pieces,
    bounds: np.ndarray,
    max_length: int,
    limit: int,
    ranks: int,
    cost: CostModel | None,
    wanted: int | None = None,
) -> tuple[Pieces, np.ndarray]:
    """Return the same documents in a number of rows that is a multiple of `ranks`, or `wanted` if
    given.

    With too few documents the rows stay unchanged. Rows of several documents are divided, which
    keeps the order. With a cost, the cheapest rows, which hold many short documents, are dealt out
    again if that improves the least balanced step.
    """
    rows = len(bounds) - 1
    missing = -rows % ranks if wanted is None else wanted - rows
    if len(pieces.lengths) < rows + missing:
        return pieces, bounds
    divided = _divide(bounds, missing, ranks)
    if cost is None:
        return pieces, divided
    costs = cost.of_rows(pieces.lengths, bounds, pieces.squares)
    cheap = np.argsort(costs, kind="stable")
    best, pooled, chosen = _worst(cost.of_rows(pieces.lengths, divided, pieces.squares), ranks), 0, None
    for taken in range(-missing % ranks or ranks, min(rows, POOLS * ranks) + 1, ranks):
        pool = members(bounds, np.sort(cheap[:taken]))
        dealt = _deal(pieces, pool, cost, taken + missing, max_length, limit)
        if dealt is not None:
            again = pieces.take(np.concatenate(dealt))
            of_dealt = cost.of_rows(again.lengths, bounds_of([len(row) for row in dealt]), again.squares)
            worst = _worst(np.concatenate([costs[cheap[taken:]], of_dealt]), ranks)
            if worst < best:
                best, pooled, chosen = worst, taken, dealt
    if chosen is None:
        return pieces, divided
    kept = np.sort(cheap[pooled:])
    sizes = np.concatenate([np.diff(bounds)[kept], [len(row) for row in chosen]])
    return pieces.take(np.concatenate([members(bounds, kept), *chosen])), bounds_of(sizes)


def _worst(costs: np.ndarray, ranks: int) -> float:
    """Return the imbalance of the least balanced step, once rows of similar cost make steps."""
    return float(imbalance(np.sort(costs), ranks).max())


def _divide(bounds: np.ndarray, missing: int, ranks: int) -> np.ndarray:
    """Return bounds with `missing` rows more; each halves the row of most documents, later ones
    first.

    Only rows of the last step are halved, or of as many last steps as it takes.
    """
    if not missing:
        return bounds
    wanted = ranks * (missing // ranks + 1)
    while bounds[-1] - bounds[missing - wanted - 1] < wanted:
        wanted += ranks
    heap = [(start - stop, -start, stop) for start, stop in pairwise(bounds[missing - wanted - 1 :].tolist())]
    heapq.heapify(heap)
    added = []
    for _ in range(missing):
        start, stop = -heap[0][1], heap[0][2]
        middle = (start + stop + 1) // 2
        added.append(middle)
        heapq.heapreplace(heap, (start - middle, -start, middle))
        heapq.heappush(heap, (middle - stop, -middle, stop))
    return np.sort(np.concatenate([bounds, np.array(added, bounds.dtype)]))


def _deal(
    pieces: Pieces, members: np.ndarray, cost: CostModel, rows: int, max_length: int, limit: int
) -> list[np.ndarray] | None:
    """Deal documents out to `rows` rows: the costliest first, each into the cheapest row with room.

    Return None if no row has room, or a row stays empty.
    """
    members = members[np.argsort(-pieces.lengths[members], kind="stable")]
    given = pieces.take(members)
    sizes, prices = given.lengths.tolist(), cost(given.lengths)
    if given.squares is not None:
        prices = cost.linear * given.lengths + cost.quadratic * given.squares
    dealt: list[list[int]] = [[] for _ in range(rows)]
    heap = [(0.0, 0, row) for row in range(rows)]
    for document, size, price in zip(members.tolist(), sizes, prices.tolist(), strict=True):
        passed = []
        while heap and (heap[0][1] + size > max_length or len(dealt[heap[0][2]]) >= limit):
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        total, tokens, row = heap[0]
        dealt[row].append(document)
        heapq.heapreplace(heap, (total + price, tokens + size, row))
        for entry in passed:
            heapq.heappush(heap, entry)
    return [np.array(row) for row in dealt] if all(dealt) else None

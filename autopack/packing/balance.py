"""Equal work for all ranks: what a row costs, rows of like cost in one step, and a last step that is complete."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from autopack.packing.lengths import Pieces
from autopack.packing.strategies import permutation

__all__ = ["CostModel", "arrange", "complete", "imbalance"]


@dataclass(frozen=True)
class CostModel:
    """What a document costs to train on, `linear * length + quadratic * length ** 2`; a row costs the sum.

    The unit is that of one token outside attention. In a transformer of hidden size h a token takes about 24 h²
    operations per layer, and a pair of tokens 2 h in causal attention: the ratio is 1 / (12 h), and the default is
    that of h = 4096. `CostModel(0, 1)` counts attention alone, `CostModel(1, 0)` tokens alone.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: wanted a finite number of at least 0")
        if not self.linear + self.quadratic:
            raise ValueError("linear=0 and quadratic=0: wanted a model in which something costs")

    def __call__(self, lengths: Any) -> np.ndarray:
        """The cost of each document, float64, of the shape of `lengths`."""
        lengths = np.asarray(lengths, np.float64)
        return lengths * (self.linear + self.quadratic * lengths)

    @classmethod
    def for_model(cls, model: Any) -> CostModel:
        """The ratio for the `hidden_size` of a model or config of transformers."""
        config = getattr(model, "config", model)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden = getattr(config, "hidden_size", None)
        if not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"wanted a model or config with a hidden_size, found {type(model).__name__}")
        return cls(1.0, 1 / (12 * hidden))


def imbalance(costs: np.ndarray, ranks: int) -> np.ndarray:
    """How much longer the slowest rank of each complete step takes than the mean: (steps,) float64 of at least 1.

    Rows `s * ranks` to `(s + 1) * ranks` are step s, as in a plan made for so many ranks.
    """
    steps = np.asarray(costs)[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return steps.max(axis=1) / steps.mean(axis=1)


def arrange(costs: np.ndarray, ranks: int, seed: int) -> np.ndarray:
    """An order of rows in which every `ranks` rows are of like cost, and such steps come in random order.

    Rows that do not make a complete step are at the end.
    """
    rows = np.argsort(-costs, kind="stable")
    left = len(rows) % ranks
    rest, rows = rows[:left], rows[left:]
    steps = rows.reshape(-1, ranks)
    return np.concatenate([steps[permutation(len(steps), seed)].ravel(), rest])


def complete(
    pieces: Pieces, bounds: np.ndarray, capacity: int, limit: int, ranks: int, cost: CostModel | None, *, ordered: bool
) -> tuple[Pieces, np.ndarray]:
    """The same documents in rows whose number is a multiple of `ranks`; unchanged where there are too few documents.

    Rows of several documents are divided. With a cost, the cheapest rows (of many short documents) are dealt out again.
    """
    rows = len(bounds) - 1
    missing = -rows % ranks
    if not missing or len(pieces.lengths) < rows + missing:
        return pieces, bounds
    if cost is not None:
        pool = _pool(pieces, bounds, ranks, cost)
        dealt = _deal(pieces.lengths, pool, bounds, capacity, limit, cost, ranks)
        if dealt is not None:
            kept = np.setdiff1d(np.arange(rows), pool)
            groups = [np.arange(bounds[r], bounds[r + 1]) for r in kept.tolist()] + dealt
            order = np.concatenate(groups)
            return Pieces(*(c[order] for c in pieces)), np.concatenate([[0], np.cumsum([len(g) for g in groups])])
    return pieces, _divide(bounds, missing)


def _divide(bounds: np.ndarray, missing: int) -> np.ndarray:
    """Bounds with so many rows more; the row of most documents is halved each time, later ones first."""
    heap = [(start - stop, -start, stop) for start, stop in pairwise(bounds.tolist())]
    heapq.heapify(heap)
    added = []
    for _ in range(missing):
        size, start, stop = heapq.heappop(heap)
        middle = -start + (-size + 1) // 2
        added.append(middle)
        heapq.heappush(heap, (-(middle + start), start, middle))
        heapq.heappush(heap, (-(stop - middle), -middle, stop))
    return np.sort(np.concatenate([bounds, np.array(added, bounds.dtype)]))


def _pool(pieces: Pieces, bounds: np.ndarray, ranks: int, cost: CostModel) -> np.ndarray:
    """The cheapest rows that are over complete steps, and a step more until they hold a document for each new row."""
    rows = len(bounds) - 1
    cheap = np.argsort(np.add.reduceat(cost(pieces.lengths), bounds[:-1]), kind="stable")
    held = np.cumsum(np.diff(bounds)[cheap])
    taken = rows % ranks
    while held[taken - 1] < -(-taken // ranks) * ranks:
        taken += ranks
    return cheap[:taken]


def _deal(
    lengths: np.ndarray,
    pool: np.ndarray,
    bounds: np.ndarray,
    capacity: int,
    limit: int,
    cost: CostModel,
    ranks: int,
) -> list[np.ndarray] | None:
    """The documents of the pool, the costliest first, each into the cheapest row; `None` where that row has no room."""
    documents = np.concatenate([np.arange(bounds[r], bounds[r + 1]) for r in pool.tolist()])
    documents = documents[np.argsort(-lengths[documents], kind="stable")]
    rows: list[list[int]] = [[] for _ in range(-(-len(pool) // ranks) * ranks)]
    heap = [(0.0, 0, row) for row in range(len(rows))]
    sizes, costs = lengths[documents].tolist(), cost(lengths[documents]).tolist()
    for document, size, price in zip(documents.tolist(), sizes, costs, strict=True):
        spent, tokens, row = heapq.heappop(heap)
        if tokens + size > capacity or len(rows[row]) == limit:
            return None
        rows[row].append(document)
        heapq.heappush(heap, (spent + price, tokens + size, row))
    return [np.array(row) for row in rows]

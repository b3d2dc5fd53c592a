"""Arms of an estimate: ways of making batches of the same documents, and what each of them computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from autopack.packing.balance import CostModel
from autopack.packing.plans import Plan

Order = Literal["random", "grouped"]
MEGABATCHES = 50
"""Batches among which transformers groups documents by length."""


@dataclass(frozen=True)
class Arm:
    """One way of making batches of the documents, for one epoch.

    Attributes:
        name: `"padded"`, `"mini-batch"` or a strategy of `autopack.packing.plan`, followed by `", groups"` where
            documents that begin alike share rows.
        batch_size: documents of a padded batch, or of a mini-batch that becomes one packed row; None for plans.
        order: of the documents of padded batches: `"random"`, or `"grouped"` by length as transformers'
            `group_by_length` does; None for others.
        rows: padded rows, or packed rows.
        tokens: columns that are computed, padding among them; rows of a plan are padded to `max_length`.
        padding: the share of those that is padding.
        pairs: pairs of columns that attention computes, the sum of squared lengths; causal attention needs half.
        cost: by the cost model, in tokens.
        speedup: the cost of the baseline over this one.
    """

    name: str
    batch_size: int | None
    order: Order | None
    rows: int
    tokens: int
    padding: float
    pairs: int
    cost: float
    speedup: float = 1.0


def padded_arms(lengths: np.ndarray, batch_sizes: list[int], cost: CostModel, seed: int) -> list[Arm]:
    """Batches of consecutive documents, each padded to its longest, for all sizes and orders."""
    shuffled = np.random.default_rng(seed).permutation(lengths)
    arms = []
    for size in batch_sizes:
        for order in get_args(Order):
            ordered = shuffled if order == "random" else _grouped(shuffled, size)
            starts = np.arange(0, len(lengths), size)
            documents = np.diff(starts, append=len(lengths))
            longest = np.maximum.reduceat(ordered, starts)
            tokens, pairs = int((longest * documents).sum()), int((longest * longest * documents).sum())
            price, padding = float((cost(longest) * documents).sum()), 1 - int(lengths.sum()) / tokens
            arms.append(Arm("padded", size, order, len(lengths), tokens, padding, pairs, price))
    return arms


def _grouped(shuffled: np.ndarray, batch_size: int) -> np.ndarray:
    """Lengths in the order of transformers' `group_by_length`: from long to short among so many batches."""
    size = batch_size * max(1, min(len(shuffled) // (batch_size * 4), MEGABATCHES))
    whole = len(shuffled) // size * size
    grouped = -np.sort(-shuffled[:whole].reshape(-1, size), axis=1).ravel()
    return np.concatenate([grouped, -np.sort(-shuffled[whole:])])


def packed_arm(made: Plan, cost: CostModel) -> Arm:
    """Rows of a plan, each padded to `max_length`; what documents of a group begin with counts once."""
    price = float(made.costs(cost).sum()) + cost.linear * made.padding
    tokens, name = len(made) * made.max_length, made.strategy if made.shared is None else f"{made.strategy}, groups"
    pairs = int((made.lengths * made.lengths if made.squares is None else made.squares).sum())
    return Arm(name, None, None, len(made), tokens, made.padding / tokens, pairs, price)

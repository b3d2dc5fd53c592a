"""What packing would gain on a data set: padding, tokens and attention of padded batches and of packed rows.

Nothing is trained and nothing is timed: costs are those of a `CostModel`, and what is counted are lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.balance import CostModel
from autopack.packing.lengths import Counts, Overflow, fit
from autopack.packing.plan import Strategy, plan
from autopack.packing.sources import lengths_of
from autopack.packing.values import is_int

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Arm", "Estimate", "estimate"]

Order = Literal["random", "grouped"]
MEGABATCHES = 50
"""Batches among which transformers groups documents by length."""


@dataclass(frozen=True)
class Arm:
    """One way of making batches of the documents, for one epoch.

    Attributes:
        name: `"padded"`, `"mini-batch"` or a strategy of `autopack.plan`.
        batch_size: documents of a padded batch, or of a mini-batch that becomes one packed row; None for plans.
        order: of the documents of padded batches: `"random"`, or `"grouped"` by length as transformers'
            `group_by_length` does; None for others.
        rows: padded rows, or packed rows.
        tokens: columns that are computed, padding among them; rows of a plan are padded to the capacity.
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


@dataclass(frozen=True, repr=False)
class Estimate:
    """What packing would gain; `str()` is a table.

    Attributes:
        lengths: (documents,) int64, tokens of each, after what `overflow` did.
        counts: what was given, and what was done to documents longer than a row.
        capacity: the most tokens of a row.
        cost: the cost model.
        baseline: padded batches in random order, which the others are compared with.
        padded: padded batches of all sizes, in both orders.
        packed: the mini-batches of `PackingCollator`, and the plans of all strategies.
    """

    lengths: np.ndarray
    counts: Counts
    capacity: int
    cost: CostModel
    baseline: Arm
    padded: tuple[Arm, ...]
    packed: tuple[Arm, ...]

    def __getitem__(self, name: str) -> Arm:
        """The packed arm of this name."""
        found = {arm.name: arm for arm in self.packed}
        if name not in found:
            raise KeyError(f"{name!r}: wanted one of {', '.join(found)}")
        return found[name]

    def tokens_saved(self, arm: Arm) -> float:
        """The share of the baseline's tokens that an arm does not compute."""
        return 1 - arm.tokens / self.baseline.tokens

    def attention_saved(self, arm: Arm) -> float:
        """The share of the baseline's attention, in operations, that an arm does not compute."""
        return 1 - arm.pairs / self.baseline.pairs

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain data, without the lengths themselves."""
        packed = [
            {**asdict(arm), "tokens_saved": self.tokens_saved(arm), "attention_saved": self.attention_saved(arm)}
            for arm in self.packed
        ]
        return {
            "capacity": self.capacity,
            "counts": asdict(self.counts),
            "lengths": _quantiles(self.lengths),
            "cost": asdict(self.cost),
            "baseline": asdict(self.baseline),
            "padded": [asdict(arm) for arm in self.padded],
            "packed": packed,
        }

    def __repr__(self) -> str:
        best = max(self.packed, key=lambda arm: arm.speedup)
        return (
            f"Estimate({len(self.lengths):,} documents, padding {self.baseline.padding:.0%} in batches of "
            f"{self.baseline.batch_size}, {best.speedup:.2f} x by {best.name})"
        )

    def __str__(self) -> str:
        from autopack.packing.estimate_text import text

        return text(self)

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Draws lengths, padding and speed-ups; returns the figure of matplotlib, and writes it where a path is given.

        Needs matplotlib (`pip install "autopack[plot]"`).
        """
        from autopack.packing.estimate_picture import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def estimate(
    data: Any,
    max_length: int = 4096,
    *,
    batch_size: int = 8,
    batch_sizes: Sequence[int] = (2, 4, 8, 16, 32, 64),
    strategies: Sequence[Strategy] = get_args(Strategy),
    overflow: Overflow = "truncate",
    cost: CostModel | None = None,
    ranks: int = 1,
    column: str | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> Estimate:
    """Says what packing a data set would gain, before any training.

    The expected speed-up is a ratio of costs by `cost`, summed over one epoch: each column that is computed costs
    `linear`, and each pair of columns of one padded row, or of one packed document, `quadratic`. It is what a device
    gives that is busy all the time, with attention that skips what packing masks; kernels that are launched for small
    batches gain more, and input that is waited for gains nothing.

    Args:
        data: tokens of each document, as a list, array or tensor of ints; a `datasets.Dataset` or list of mappings; or
            the path of a `.json`, `.jsonl`, `.npy` or `.parquet` file of lengths or examples, or of a dataset that
            `save_to_disk` wrote.
        max_length: the most tokens of a packed row, and of a document.
        batch_size: documents of a padded batch, for the baseline.
        batch_sizes: documents of a padded batch, for the padding by batch size.
        strategies: of `autopack.plan`.
        overflow: what becomes of documents longer than `max_length`, in padded batches too; see `autopack.plan`.
        cost: what tokens and attention cost; by default those of a hidden size of 4096.
        ranks: processes, for plans; see `autopack.plan`.
        column: of the data: ints are lengths, lists are counted, text goes through the tokenizer. By default
            `input_ids`, `length` or `lengths`, and with a tokenizer `text`.
        tokenizer: a tokenizer, or the name or path of one of transformers, for data that is text.
        seed: of the random orders.

    Raises:
        InvalidPacking: for data that holds no lengths, or lengths that are not ints of at least 1.
        ValueError: for options out of range.
    """
    for size in (batch_size, *batch_sizes):
        if not is_int(size) or size < 1:
            raise ValueError(f"batch size {size!r}: wanted an int of at least 1")
    cost = cost or CostModel()
    given = lengths_of(data, column, tokenizer)
    plan([1], max_length, overflow=overflow, seed=seed, ranks=ranks)  # checks the options
    pieces, counts = fit(given, max_length, overflow)
    lengths = pieces.lengths
    if not len(lengths):
        raise InvalidPacking(f"all documents are longer than max_length={max_length}, and overflow='drop' leaves none")
    total = int(lengths.sum())
    own = int((lengths * lengths).sum()), float(cost(lengths).sum())
    orders = _orders(lengths, seed)
    baseline = _padded(orders(batch_size, "random"), batch_size, "random", total, cost)

    def compared(arm: Arm) -> Arm:
        return Arm(**{**asdict(arm), "speedup": baseline.cost / arm.cost})

    padded = [
        compared(_padded(orders(size, order), size, order, total, cost))
        for size in sorted({*batch_sizes, batch_size})
        for order in get_args(Order)
    ]
    batches = -(-len(lengths) // batch_size)
    packed = [compared(Arm("mini-batch", batch_size, None, batches, total, 0.0, *own))]
    for strategy in strategies:
        made = plan(lengths, max_length, strategy, seed=seed, ranks=ranks)
        squares = made.lengths * made.lengths
        price = float(cost(made.lengths).sum()) + cost.linear * made.padding
        tokens = len(made) * max_length
        packed.append(
            compared(Arm(strategy, None, None, len(made), tokens, made.padding / tokens, int(squares.sum()), price))
        )
    return Estimate(lengths, counts, max_length, cost, baseline, tuple(padded), tuple(packed))


def _orders(lengths: np.ndarray, seed: int) -> Any:
    """A function of batch size and order that gives the lengths in that order."""
    shuffled = np.random.default_rng(seed).permutation(lengths)

    def ordered(batch_size: int, order: Order) -> np.ndarray:
        if order == "random":
            return shuffled
        size = batch_size * max(1, min(len(shuffled) // (batch_size * 4), MEGABATCHES))
        whole = len(shuffled) // size * size
        grouped = -np.sort(-shuffled[:whole].reshape(-1, size), axis=1).ravel()
        return np.concatenate([grouped, -np.sort(-shuffled[whole:])])

    return ordered


def _padded(lengths: np.ndarray, batch_size: int, order: Order, total: int, cost: CostModel) -> Arm:
    """Batches of consecutive documents, each padded to its longest."""
    starts = np.arange(0, len(lengths), batch_size)
    sizes = np.diff(starts, append=len(lengths))
    longest = np.maximum.reduceat(lengths, starts)
    tokens, pairs = int((longest * sizes).sum()), int((longest * longest * sizes).sum())
    price = float((cost(longest) * sizes).sum())
    return Arm("padded", batch_size, order, len(lengths), tokens, 1 - total / tokens, pairs, price)


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    shares = {"min": 0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "max": 1}
    found = np.quantile(lengths, list(shares.values()))
    return {**dict(zip(shares, found.tolist(), strict=True)), "mean": float(lengths.mean())}

"""What packing would gain on a data set: padding, tokens and attention of padded batches and of packed rows.

Nothing is trained and nothing is timed: costs are those of a `CostModel`, and what is counted are lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from autopack.errors import InvalidPacking
from autopack.packing.arms import Arm, Arms, packed_arm, padded_arms
from autopack.packing.balance import CostModel
from autopack.packing.estimate_picture import draw
from autopack.packing.estimate_text import text
from autopack.packing.lengths import Overflow, fit
from autopack.packing.options import is_int
from autopack.packing.plan import Strategy, plan
from autopack.packing.sources import lengths_of

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True, repr=False)
class Estimate(Arms):
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

    def __repr__(self) -> str:
        best = max(self.packed, key=lambda arm: arm.speedup)
        return (
            f"Estimate({len(self.lengths):,} documents, padding {self.baseline.padding:.0%} in batches of "
            f"{self.baseline.batch_size}, {best.speedup:.2f} x by {best.name})"
        )

    def __str__(self) -> str:
        return text(self)

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Draws lengths, padding and speed-ups; returns the figure of matplotlib, and writes it where a path is given.

        Needs matplotlib (`pip install "autopack[plot]"`).
        """
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
    padded = padded_arms(lengths, sorted({*batch_sizes, batch_size}), cost, seed)
    baseline = next(arm for arm in padded if (arm.batch_size, arm.order) == (batch_size, "random"))
    own = int(lengths.sum()), 0.0, int((lengths * lengths).sum()), float(cost(lengths).sum())
    packed = [Arm("mini-batch", batch_size, None, -(-len(lengths) // batch_size), *own)]
    for strategy in strategies:
        packed.append(packed_arm(plan(lengths, max_length, strategy, seed=seed, ranks=ranks), cost))
    compared = (tuple(arm.against(baseline) for arm in arms) for arms in (padded, packed))
    return Estimate(lengths, counts, max_length, cost, baseline, *compared)

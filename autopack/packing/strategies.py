"""Rows filled by best fit or in order; equal work for all ranks: costs of rows, steps of rows of
similar cost, and a complete last step; and places of the documents of a batch.

They work on numbers of documents per length, or on sums over all documents, and not on one document
at a time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopack.inspection.configs import text_config
from autopack.packing.checks import POSITIONS, bounds_of, does_not_fit, invalid, numbered, sums


def permutation(count: int, seed: int, lengths: np.ndarray | None = None) -> np.ndarray:
    """Return a random order of `count` indices; with `lengths`, longest first, ties at random.

    The source is 64 raw bits of PCG64 for each index, which are the same in every release of numpy.
    `Generator.permutation` may change, and then a resumed run would go on with other rows.

    One array is sorted in place. It holds, for each index, how much shorter it is than the longest,
    as many of the drawn bits as there is room for, and the index itself, which decides where those
    bits are the same.
    """
    longest = 0 if lengths is None else int(lengths.max())
    of_length = 0 if lengths is None else (longest - int(lengths.min())).bit_length()
    index_bits = np.uint64((1 << max(0, count - 1).bit_length()) - 1)
    packed = np.random.PCG64(seed).random_raw(count)
    packed >>= np.uint64(of_length)
    packed &= ~index_bits
    packed |= np.arange(count, dtype=np.uint64)
    if lengths is not None and of_length:
        shorter = longest - lengths
        shorter <<= 64 - of_length
        packed |= shorter.view(np.uint64)
    packed.sort()
    packed &= index_bits
    return packed.view(np.int64)


def best_fit(
    lengths: np.ndarray, max_length: int, limit: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of documents in rows by best-fit decreasing, and the rows' bounds in it.

    The longest document comes first, and each goes into the least room that fits.

    Rows of equal room and documents of equal length are interchangeable, so ranges of rows take
    documents together: a row with the least room keeps the least room as long as the next document
    of that length fits. The work grows with the number of different lengths and rooms, and hardly
    with the number of documents.
    """
    least, opened = int(lengths.min()), 0
    # Rows that are not full: room, turn, first row, end, documents of each; ascending, the last
    # that came first among equal rooms.
    free: list[tuple[int, ...]] = []
    placed = []  # first row, rows, and how many documents each of them took, in this order
    turn = itertools.count(0, -1)
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(free, (size,))  # the least room that suffices
            if at == len(free):
                room, start, held = max_length, opened, 0
                stop = opened = opened + -(-count // min(max_length // size, limit))
            else:
                room, _, start, stop, held = free.pop(at)
            fit = min(room // size, limit - held, count)
            rows = min(stop - start, count // fit)
            placed.append((start, rows, fit))
            if room - fit * size >= least and held + fit < limit:
                insort(free, (room - fit * size, next(turn), start, start + rows, held + fit))
            if start + rows < stop:
                insort(free, (room, next(turn), start + rows, stop, held))
            count -= rows * fit
    first, sizes, taken = np.array(placed).T
    numbers = np.repeat(first, sizes) + numbered(sizes)
    of_documents = np.repeat(numbers, np.repeat(taken, sizes))
    bounds = bounds_of(np.bincount(of_documents))
    row_by_row = np.argsort(of_documents, kind="stable")
    del of_documents  # as large as the lengths
    return permutation(len(lengths), seed, lengths)[row_by_row], bounds


def next_fit(lengths: np.ndarray, max_length: int, limit: int | np.ndarray) -> np.ndarray:
    """Return bounds of rows that are filled in order, each until the next document does not fit.

    `limit` is the most documents of a row, or of the row that begins with each of them.
    """
    ends = np.cumsum(lengths)
    following = np.searchsorted(ends, ends - lengths + max_length, side="right")
    following = memoryview(np.minimum(following, np.arange(len(lengths)) + limit))
    bounds, at = [0], 0
    while at < len(lengths):
        at = following[at]
        bounds.append(at)
    return np.array(bounds)


@dataclass(frozen=True)
class CostModel:
    """Cost of training on a document, `linear * length + quadratic * length ** 2`.

    A row costs the sum of its documents.

    The unit is the cost of one token outside attention. In a transformer of hidden size h a token
    takes about 24 h² operations per layer, and a pair of tokens 2 h in causal attention: the ratio
    is 1 / (12 h), and the default is for h = 4096. `CostModel(0, 1)` counts attention alone,
    `CostModel(1, 0)` tokens alone.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < float("inf")
            ):
                raise ValueError(f"{name}={value!r}: wanted a finite number of at least 0")
        if not self.linear + self.quadratic:
            raise ValueError("linear=0 and quadratic=0: wanted a model in which something costs")

    def __call__(self, lengths: Any) -> np.ndarray:
        """Return the cost of each document, float64, of the shape of `lengths`."""
        lengths = np.asarray(lengths, np.float64)
        return lengths * (self.linear + self.quadratic * lengths)

    def of_rows(
        self, lengths: np.ndarray, bounds: np.ndarray, shared: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the cost of each row, (rows,) float64, whose documents lie between `bounds`.

        Row r holds documents `bounds[r]` to `bounds[r + 1]`. The first `shared` tokens of each are
        computed with another document. Sums are of ints, and so the same on every machine: the
        order of rows of almost equal cost depends on it.
        """
        computed, squares = lengths, lengths * lengths
        if shared is not None:
            computed, squares = lengths - shared, squares - shared * shared
        return self.linear * sums(computed, bounds) + self.quadratic * sums(squares, bounds)

    @classmethod
    def for_model(cls, model: Any) -> CostModel:
        """Return the cost model for the `hidden_size` of a model or config of transformers."""
        hidden = getattr(text_config(getattr(model, "config", model)), "hidden_size", None)
        if not isinstance(hidden, int) or hidden < 1:
            raise ValueError(
                f"wanted a model or config with a hidden_size, found {type(model).__name__}"
            )
        return cls(1.0, 1 / (12 * hidden))


def arrange(costs: np.ndarray, ranks: int, seed: int) -> np.ndarray:
    """Return an order of rows in which the `ranks` rows of each step are of similar cost.

    Steps are in random order, the costliest row of each first. Rows that do not make a complete
    step are at the end.
    """
    rest, rows = np.split(np.argsort(-costs, kind="stable"), [len(costs) % ranks])
    steps = rows.reshape(-1, ranks)[permutation(len(rows) // ranks, seed)]
    return np.concatenate([steps.ravel(), rest])


def complete(bounds: np.ndarray, ranks: int) -> np.ndarray:
    """Return bounds of rows, some of them halved so that their number is a multiple of `ranks`.

    Rows are halved, which keeps the order: each time the row of most documents, later ones first,
    of the last step, or of as many last steps as it takes. With too few documents the rows stay
    unchanged.
    """
    rows = len(bounds) - 1
    missing = -rows % ranks
    if not missing or bounds[-1] < rows + missing:
        return bounds
    taken = ranks - missing
    while bounds[-1] - bounds[-1 - taken] < taken + missing:
        taken += ranks
    whole, last = np.split(bounds, [-1 - taken])
    for _ in range(missing):
        sizes = np.diff(last)
        row = len(sizes) - 1 - int(sizes[::-1].argmax())
        last = np.insert(last, row + 1, (last[row] + last[row + 1] + 1) // 2)
    return np.concatenate([whole, last])


class Places(NamedTuple):
    """Places of a batch's tokens and documents in its rows.

    `real` (rows, columns) is True at tokens, and `tokens` (tokens,) are their places in the
    flattened rows, in the order of the documents. Documents, and the padding after the last of each
    row as documents of its own, begin at `starts` and take `lengths` columns each. `ends`
    (examples,) are the tokens up to the end of each example.
    """

    real: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray

    def flash_bounds(self, per_row: int | None) -> tuple[np.ndarray, int]:
        """Return `cu_seq_lens` of documents in the flattened rows, int32, and the longest length.

        With the most documents `per_row`, for fixed rows, their number is fixed, and the length is
        a row's.
        """
        if per_row is None:
            return bounds_of(self.lengths).astype(np.int32), int(self.lengths.max())
        rows, columns = self.real.shape
        # The padding at the end of a row is one document here: how often it is cut differs between
        # batches.
        starts, real = self.starts, self.real.ravel()
        kept = starts[real[starts] | real[starts - 1] | (starts % columns == 0)]
        bounds = np.full(rows * (per_row + 1) + 1, rows * columns, np.int32)
        bounds[: len(kept)] = kept
        return bounds, columns

    def check_positions(self, positions: np.ndarray) -> None:
        """Raise `InvalidPacking` if `positions` go on from an example to the next in its row.

        `positions`, (columns of all rows,), are of the flattened rows.
        """
        last = self.tokens[self.ends - 1]
        steps, columns = np.diff(positions, append=0), self.real.shape[1]
        runs_on = np.flatnonzero((steps[last] == 1) & ((last + 1) % columns != 0))
        if runs_on.size:
            at = int(positions[last[runs_on[0]]])
            raise invalid(
                int(runs_on[0]),
                POSITIONS,
                f"end at {at}, and the next document of the row starts at {at + 1}: no boundary is "
                "left; drop them by drop_keys=('position_ids',)",
            )


def place(lengths: np.ndarray, documents: np.ndarray, options: Any) -> Places:
    """Return the places of examples in rows that are filled in order (next-fit).

    Example i has `documents[i]` to `documents[i + 1]`, of these `lengths`; the `options` are those
    of a `PackingCollator`. Raises `InvalidPacking` if they take more than its `rows`.
    """
    columns, count = sums(lengths, documents), len(documents) - 1
    most: int | np.ndarray = count  # of a row that begins with each example
    if options.max_documents is not None:
        ends = np.searchsorted(documents, documents[:-1] + options.max_documents, side="right")
        most = ends - 1 - np.arange(count)
    bounds = next_fit(columns, options.max_length or int(columns.sum()), most)
    used = sums(columns, bounds)
    rows, width = options.rows or len(used), int(used.max())
    if len(used) > rows:
        raise does_not_fit(
            f"{rows=}: {documents[-1]} documents of {lengths.sum()} tokens take {len(used)} rows "
            f"of {options.max_length}; raise it, or make smaller batches (PackedBatchSampler does)"
        )
    used = np.append(used, np.zeros(rows - len(used), used.dtype))
    width = (
        options.max_length if options.rows else width + -width % (options.pad_to_multiple_of or 1)
    )

    # Padding is cut into documents as well, none of them longer than the longest real one.
    # columns after the last document of the row; negative in them
    past_end = np.arange(width) - used[:, None]
    real, ends = past_end < 0, np.cumsum(lengths)
    tokens = np.flatnonzero(real)
    fillers = np.flatnonzero((past_end >= 0) & (past_end % lengths.max() == 0))
    starts = np.sort(np.concatenate([tokens[ends - lengths], fillers]))
    ends = ends[documents[1:] - 1]
    return Places(real, tokens, starts, np.diff(starts, append=real.size), ends)

"""Places of the documents of a batch: columns and rows, and padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopack.packing.checks import POSITIONS, does_not_fit, invalid
from autopack.packing.lengths import bounds_of, numbered, sums
from autopack.packing.strategies import next_fit


@dataclass
class Places:
    """Places of the tokens of a batch.

    `real` (rows, columns) is True at tokens, and `tokens` (tokens,) are their places in the
    flattened rows, in the order of the documents. Documents, and the padding after the last of each
    row as documents of its own, begin at `starts` and take `lengths` columns each. `is_filler` is
    True for documents that are only padding. `ends` (examples,) are the tokens up to the end of
    each example.
    """

    real: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    is_filler: np.ndarray
    ends: np.ndarray

    def flash_bounds(self, per_row: int | None) -> tuple[np.ndarray, int]:
        """Return bounds of documents over the flattened rows, int32, and the longest length.

        With the most documents `per_row`, for fixed rows, their number is fixed, and the length is
        a row's.
        """
        if per_row is None:
            return bounds_of(self.lengths).astype(np.int32), int(self.lengths.max())
        rows, columns = self.real.shape
        starts, row = self.starts, self.starts // columns
        # The padding at the end of a row is one document here: how often it is cut differs between
        # batches.
        again = self.is_filler & np.append(False, self.is_filler[:-1] & (row[1:] == row[:-1]))
        bounds = np.full(rows * (per_row + 1) + 1, rows * columns, np.int32)
        bounds[: (~again).sum()] = starts[~again]
        return bounds, columns

    def check_positions(self, positions: np.ndarray) -> None:
        """Raise `InvalidPacking` if the `positions`, (columns of all rows,), of an example run on
        into the next document."""
        last, width = self.tokens[self.ends - 1], self.real.shape[1]
        following = np.append(self.starts, self.real.size)[
            np.searchsorted(self.starts, last, side="right")
        ]
        step = np.append(positions, 0)[following] - positions[last]
        in_row = following // width == last // width  # examples that something follows in their row
        runs_on = np.flatnonzero(in_row & ((step == 1) | (step == following - last)))
        if runs_on.size:
            at, start = int(positions[last[runs_on[0]]]), int(positions[following[runs_on[0]]])
            raise invalid(
                int(runs_on[0]),
                POSITIONS,
                f"end at {at}, and the next document of the row starts at {start}: no "
                "boundary is left; drop them by drop_keys=('position_ids',)",
            )


def place(
    lengths: np.ndarray,
    documents: np.ndarray,
    max_length: int | None,
    multiple: int,
    max_documents: int | None,
    rows: int | None,
) -> Places:
    """Put the examples into rows, in order; start a new row if the next does not fit (next-fit).

    Example i has `documents[i]` to `documents[i + 1]`, of these `lengths`. Options have the names
    of `PackingCollator`; rows are padded to a `multiple` of so many columns.
    """
    count = len(documents) - 1
    columns = sums(lengths, documents)
    most: int | np.ndarray = count  # of a row that begins with each example
    if max_documents is not None:
        most = (
            np.searchsorted(documents, documents[:-1] + max_documents, side="right")
            - 1
            - np.arange(count)
        )
    bounds = next_fit(columns, max_length or int(columns.sum()), most)
    used = sums(columns, bounds)
    if rows and len(used) > rows:
        raise does_not_fit(
            f"rows={rows}: {documents[-1]} documents of {lengths.sum()} tokens take {len(used)} "
            f"rows of {max_length}; raise it, or make smaller batches (PackedBatchSampler does)"
        )
    if rows and max_length:
        used, width = np.append(used, np.zeros(rows - len(used), used.dtype)), max_length
    else:
        width = int(used.max()) + -int(used.max()) % multiple

    before = np.cumsum(lengths) - lengths  # columns of all documents before
    # of the documents of each row
    moved = np.arange(len(bounds) - 1) * width - before[documents[bounds[:-1]]]
    firsts = before + np.repeat(moved, np.diff(documents[bounds]))
    tokens = np.repeat(firsts, lengths) + numbered(lengths)
    real = np.zeros((len(used), width), np.bool_)
    real.flat[tokens] = True

    # Padding is cut into documents as well, none of them longer than the longest real one.
    # columns after the last document of the row; negative in them
    past_end = np.arange(width) - used[:, None]
    fillers = np.flatnonzero((past_end >= 0) & (past_end % lengths.max() == 0))
    starts = np.concatenate([firsts, fillers])
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.cumsum(lengths)[documents[1:] - 1]
    return Places(
        real, tokens, starts, np.diff(starts, append=real.size), order >= len(firsts), ends
    )

"""Packed streams: every so many examples of a stream become rows, and nothing else of it is held.

They resume exactly although a shuffle buffer is in them, by drawing again what they drew. datasets saves where a stream
is, and not what its shuffle buffers hold: such a stream goes on with other examples, and loses those in the buffer.
Where there is such a buffer, the rows that were given are counted instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from datasets import iterable_dataset as upstream

from autopack.errors import InvalidPacking
from autopack.packing.plans import plan
from autopack.packing.rows import Packing

ROWS = "autopack_rows"


class ReplayedStream(IterableDataset):
    """An `IterableDataset` whose state is the number of rows that it gave; resuming draws as many and drops them."""

    _given = 0
    _resumed: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        resumed = self._resumed
        skipped = resumed[ROWS] if resumed is not None and resumed["epoch"] == self.epoch else 0
        self._given = 0
        for row in super().__iter__():
            self._given += 1
            if self._given > skipped:
                yield row

    def state_dict(self) -> dict[str, Any]:
        """Rows given in this epoch, and the epoch."""
        return {ROWS: self._given, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the rows that were given, when this is iterated in the epoch in which they were."""
        if ROWS not in state_dict:
            raise InvalidPacking(
                f"wanted a state of this stream, with {ROWS!r}, found {sorted(state_dict)}", code="other-data"
            )
        self._resumed = dict(state_dict)
        self._given = state_dict[ROWS]


def _forgets(dataset: IterableDataset) -> bool:
    """Whether a shuffle buffer is in the dataset."""
    waiting = [dataset._ex_iterable]
    for found in waiting:  # grows meanwhile
        for value in vars(found).values():
            values = value if isinstance(value, (list, tuple)) else [value]
            waiting += [v for v in values if isinstance(v, upstream._BaseExamplesIterable)]
    return any(isinstance(found, upstream.BufferShuffledExamplesIterable) for found in waiting)


def pack_stream(dataset: IterableDataset, packing: Packing, buffer_size: int) -> IterableDataset:
    """The rows of a stream, as one that resumes by `state_dict`."""
    if packing.planned["cost"] is not None or packing.planned["ranks"] != 1:
        raise ValueError("cost= and ranks= arrange all rows of a dataset, and a stream has no end: leave them out")
    plan([1], packing.max_length, **packing.planned)  # checks the options before the first example is drawn
    names = dataset.column_names
    if names is None:
        names = list(next(iter(dataset.take(1)), {}))
    rows = dataset.with_format(None).map(packing, batched=True, batch_size=buffer_size, remove_columns=names)
    if _forgets(rows):
        rows.__class__ = ReplayedStream
    return rows

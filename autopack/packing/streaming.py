"""Packed streams: a buffer of examples at a time becomes rows, and nothing else of the stream is
held.

They resume exactly although they may have a shuffle buffer. datasets saves the place of a stream,
and not the contents of its shuffle buffers: such a stream goes on with other examples, and loses
those in the buffer. A stream with such a buffer counts the rows that it gave instead, and draws
them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from datasets.iterable_dataset import BufferShuffledExamplesIterable

from autopack.integrations.trainers import iterables_of
from autopack.packing.checks import other_data
from autopack.packing.rows import Packing

ROWS = "autopack_rows"


class ReplayedStream(IterableDataset):
    """An `IterableDataset` whose state is the number of rows given; resuming draws as many and
    drops them."""

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
        """Return the rows given in this epoch, and the epoch."""
        return {ROWS: self._given, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the rows that were given, once this is iterated in their epoch."""
        if ROWS not in state_dict:
            raise other_data(f"wanted a state of this stream, with {ROWS!r}, found {sorted(state_dict)}")
        self._resumed = dict(state_dict)
        self._given = state_dict[ROWS]


def pack_stream(dataset: IterableDataset, packing: Packing, buffer_size: int) -> IterableDataset:
    """Return the rows of a stream, as a stream that resumes by `state_dict`."""
    names = dataset.column_names
    if names is None:
        names = list(next(iter(dataset.take(1)), {}))
    rows = dataset.with_format(None).map(packing, batched=True, batch_size=buffer_size, remove_columns=names)
    if any(isinstance(each, BufferShuffledExamplesIterable) for each in iterables_of(rows)):
        rows.__class__ = ReplayedStream
    return rows

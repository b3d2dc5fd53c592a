"""Packed streams: every so many examples of a stream become rows, and nothing else of it is held."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.documents import Documents
from autopack.packing.examples import from_columns, wanted
from autopack.packing.plan import plan
from autopack.packing.rows import RowOptions, Rows
from autopack.packing.strategies import ORDERED

__all__ = ["Window", "pack_stream"]

logger = logging.getLogger(__name__)


@dataclass
class Window:
    """Makes rows of a batch of examples, as `IterableDataset.map` hands it over: columns in, columns out.

    A function of the batch alone, so that a stream which resumes makes the same rows again.
    """

    max_length: int
    planned: dict[str, Any]
    carried: dict[str, Any]
    added: dict[str, Any]
    warned: bool = False

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        names = list(batch)
        try:
            table = from_columns({name: batch[name] for name in names}, wanted(names, **self.carried))
            documents = Documents(table, None, **self.carried)
            seed = zlib.crc32(documents.lengths.tobytes(), int(self.planned["seed"]) & 0xFFFFFFFF)
            made = plan(documents.lengths, self.max_length, **{**self.planned, "seed": seed})
            if (made.counts.truncated or made.counts.dropped) and not self.warned:
                logger.warning("Packed: %r; buffers that follow are packed alike, and nothing more is said", made)
                self.warned = True
            if not len(made):
                return {}
            if self.planned["strategy"] not in ORDERED:  # a plan lists the longest documents first
                made = made.select(np.random.default_rng(seed).permutation(len(made)))
            return Rows(documents, made, RowOptions(**self.added)).table(0, len(made)).to_pydict()
        except InvalidPacking as error:
            raise InvalidPacking(
                f"in a buffer of {len(batch[names[0]])} examples, counted from its start: {error}"
            ) from error


def pack_stream(dataset: Any, window: Window, buffer_size: int) -> Any:
    """The rows of an `IterableDataset`, as one that resumes by `state_dict`."""
    # Options are checked before the first example is drawn.
    plan([1], window.max_length, **window.planned)
    names = dataset.column_names
    if names is None:
        names = list(next(iter(dataset.take(1)), {}))
    rows = dataset.with_format(None).map(window, batched=True, batch_size=buffer_size, remove_columns=names)
    from autopack.packing.replay import ReplayedStream, forgets

    return ReplayedStream.of(rows) if forgets(rows) else rows

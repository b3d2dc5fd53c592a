"""Packed rows as arrow tables: the pieces of a plan, gathered from where the documents lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from autopack.errors import InvalidPacking
from autopack.packing.collator import COMPLETION_KEYS, IGNORED, LABEL_KEYS
from autopack.packing.documents import IDS, POSITIONS, Documents
from autopack.packing.plan import Plan
from autopack.packing.weights import DOCUMENT_WEIGHT, LOSS_WEIGHTS, Weighing, token_weights

__all__ = ["RowOptions", "Rows"]

LENGTHS = "seq_lengths"
MOST = 2**31 - 1


@dataclass(frozen=True)
class RowOptions:
    """What packed rows hold beside the columns of the documents; see `autopack.pack`."""

    mask_first_label: bool = True
    position_ids: bool = True
    first_position: int = 0
    loss_weights: Weighing | None = None


class Rows:
    """The rows of a plan, any of them at any time; called with a batch of row numbers, as `Dataset.map` does.

    Raises `InvalidPacking` where the columns of the documents cannot be columns of such rows.
    """

    def __init__(self, documents: Documents, plan: Plan, options: RowOptions):
        self.documents = documents
        self.plan = plan
        self.options = options
        self._check()

    def _check(self) -> None:
        if self.plan.capacity > MOST:
            raise ValueError(f"max_length={self.plan.capacity}: wanted at most {MOST:,} tokens, as lists of arrow have")
        documents, counts = self.documents, self.plan.counts
        key = documents.label_key
        if not len(self.plan):
            raise InvalidPacking(f"no document is left of {counts.documents:,}: all are longer than max_length")
        if counts.split and key in documents.per_document:
            way = "use overflow='truncate' or 'drop', or name it in drop_columns"
            raise InvalidPacking(
                f"{counts.split:,} documents are cut into pieces, and {key!r} is one per document; {way}"
            )
        if self.options.loss_weights is None:
            return
        if LOSS_WEIGHTS in documents.per_token:
            raise InvalidPacking(f"found a column {LOSS_WEIGHTS!r} beside loss_weights=; name it in drop_columns")
        if key in documents.per_document:
            raise InvalidPacking(
                f"loss_weights= is for labels per token, and {key!r} is one per document; leave it out"
            )
        if key is None and not self.options.mask_first_label:
            raise InvalidPacking("loss_weights= with mask_first_label=False needs a column of labels")

    def __call__(self, batch: Mapping[str, Any]) -> pa.Table:
        rows = batch["row"]
        return self.table(int(rows[0]), int(rows[-1]) + 1)

    def table(self, first: int, end: int) -> pa.Table:
        """The rows from `first` to `end`, in new memory."""
        plan, documents = self.plan, self.documents
        bounds = plan.bounds[first : end + 1]
        pieces = slice(int(bounds[0]), int(bounds[-1]))
        chosen, lengths = plan.documents[pieces], plan.lengths[pieces]
        bounds = bounds - bounds[0]
        starts = np.cumsum(lengths) - lengths
        tokens = np.append(starts, lengths.sum())[bounds]  # where the rows begin, and where the last ends
        values = {n: documents.values(n, chosen, plan.offsets[pieces], lengths) for n in documents.per_token}
        self._mask_first_labels(values, starts)
        if self.options.position_ids and POSITIONS not in values:
            values[POSITIONS] = pa.array(_positions(starts, lengths, self.options.first_position))
        of_documents = {name: documents.of_documents(name, chosen) for name in documents.per_document}
        if self.options.loss_weights is not None:
            values[LOSS_WEIGHTS] = pa.array(self._weights(values, of_documents.get(DOCUMENT_WEIGHT), starts, lengths))
        columns = {name: _lists(tokens, array) for name, array in values.items()}
        columns |= {name: _lists(bounds, array) for name, array in of_documents.items()}
        columns[LENGTHS] = _lists(bounds, pa.array(lengths.astype(np.int32)))
        return pa.table(columns)

    def _mask_first_labels(self, values: dict[str, pa.Array], starts: np.ndarray) -> None:
        """No token of its document predicts a first label."""
        key = next((k for k in LABEL_KEYS if k in values), None)
        if key is None or not self.options.mask_first_label:
            return
        if not pa.types.is_signed_integer(values[key].type):
            found = f"found {values[key].type}, wanted signed ints, of which {IGNORED} is no target"
            raise InvalidPacking(f"column {key!r}: {found}; cast it, or pass mask_first_label=False")
        labels = values[key].to_numpy().copy()
        labels[starts] = IGNORED
        values[key] = pa.array(labels)

    def _weights(
        self, values: dict[str, pa.Array], of_documents: pa.Array | None, starts: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        key = next((k for k in LABEL_KEYS if k in values), None)
        if key is not None:
            targets = values[key].to_numpy() != IGNORED
        else:  # as the collator makes them
            targets = np.ones(len(values[IDS]), np.bool_)
            for name in COMPLETION_KEYS:
                if name in values:
                    targets &= values[name].to_numpy(zero_copy_only=False).astype(np.bool_)
            targets[starts] = False
        assert self.options.loss_weights is not None
        given = None if of_documents is None else of_documents.to_numpy(zero_copy_only=False)
        return token_weights(targets, lengths, self.options.loss_weights, given)


def _positions(starts: np.ndarray, lengths: np.ndarray, first: int) -> np.ndarray:
    """Positions that restart at each document, (tokens,) int32."""
    steps = np.ones(lengths.sum(), np.int32)
    steps[starts[1:]] = 1 - lengths[:-1]
    steps[0] = first
    return np.cumsum(steps, out=steps)


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.Array:
    """Values cut at these offsets, as one list each."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)

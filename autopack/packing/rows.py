"""Packed rows as arrow tables: the pieces of a plan, gathered from the tables of documents."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from autopack.errors import InvalidPacking
from autopack.inspection.media import PICTURES
from autopack.layout import IGNORED_LABEL
from autopack.packing.checks import (
    COMPLETION_KEYS,
    DOCUMENT_WEIGHT,
    IDS,
    LABEL_KEYS,
    LENGTHS,
    LOSS_WEIGHTS,
    POSITIONS,
    Weighing,
    invalid,
    token_weights,
)
from autopack.packing.documents import Documents, Values, empty, from_columns
from autopack.packing.groups import groups_of
from autopack.packing.lengths import ANY_WAY, Counts, fit
from autopack.packing.media import put_back, set_aside
from autopack.packing.plans import Plan, plan
from autopack.packing.strategies import ORDERED

logger = logging.getLogger(__name__)


@dataclass
class Rows:
    """Rows of a plan, any of them at any time; called with a batch of row numbers, as `Dataset.map`
    does.

    The options of `autopack.pack` of the same names add columns to those of the documents. Raises
    `InvalidPacking` if the columns of the documents cannot be columns of such rows.
    """

    documents: Documents
    plan: Plan
    mask_first_label: bool = True
    position_ids: bool = True
    first_position: int = 0
    loss_weights: Weighing | None = None

    def __post_init__(self) -> None:
        documents, counts, key = self.documents, self.plan.counts, self.documents.label_key
        if not len(self.plan):
            raise nothing_left(counts)
        if counts.split and key in documents.per_document:
            found = f"{counts.split:,} documents are cut into pieces, and {key!r} is one per document"
            raise InvalidPacking(f"{found}; use overflow='truncate' or 'drop', or name it in drop_columns")
        pictures = [name for name in documents.per_document if name in PICTURES]
        if pictures and (counts.split or counts.truncated):
            found = f"{counts.split + counts.truncated:,} documents are cut, and their {pictures[0]!r} are not"
            raise InvalidPacking(f"{found}; use overflow='drop', or name it in drop_columns")
        if self.loss_weights is None:
            return
        if LOSS_WEIGHTS in documents.per_token:
            raise InvalidPacking(f"found a column {LOSS_WEIGHTS!r} beside loss_weights=; name it in drop_columns")
        if key in documents.per_document:
            raise InvalidPacking(f"loss_weights= is for labels per token; {key!r} is one per document: leave it out")
        if key is None and not self.mask_first_label:
            raise InvalidPacking("loss_weights= with mask_first_label=False needs a column of labels")

    def __call__(self, batch: Mapping[str, Any]) -> pa.Table:
        return self.table(int(batch["row"][0]), int(batch["row"][-1]) + 1)

    def table(self, first: int = 0, end: int | None = None) -> pa.Table:
        """Return the rows from `first` to `end`."""
        plan, documents = self.plan, self.documents
        bounds = plan.bounds[first : None if end is None else end + 1]
        pieces = slice(int(bounds[0]), int(bounds[-1]))
        chosen, lengths = plan.documents[pieces], plan.lengths[pieces]
        bounds = bounds - bounds[0]
        starts = np.cumsum(lengths) - lengths
        tokens = np.append(starts, lengths.sum())[bounds]  # where the rows begin, and where the last ends
        values = documents.values(chosen, plan.offsets[pieces], lengths)
        if values[IDS].min() < 0:
            index = int(chosen[np.searchsorted(np.cumsum(lengths), (values[IDS] < 0).argmax(), "right")])
            raise invalid(index, IDS, "found a token id below 0", "column ")
        labels = self._labels(values, starts)
        if self.position_ids and POSITIONS not in values:
            values[POSITIONS] = positions = empty(int(lengths.sum()), np.dtype(np.int32))
            positions[:] = np.repeat((self.first_position - starts).astype(np.int32), lengths)
            positions += np.arange(len(positions), dtype=np.int32)
        of_documents = {name: documents.of_documents(name, chosen) for name in documents.per_document}
        if self.loss_weights is not None:
            if labels is None:  # those of the labels that the collator makes
                targets = np.ones(len(values[IDS]), np.bool_)
                targets[starts] = False
            else:
                targets = labels != IGNORED_LABEL
            given = of_documents.get(DOCUMENT_WEIGHT)
            weights = None if given is None else _weights(given, chosen)
            values[LOSS_WEIGHTS] = token_weights(targets, lengths, self.loss_weights, weights)
        columns = {name: _lists(tokens, array) for name, array in values.items()}
        columns |= {name: _lists(bounds, array) for name, array in of_documents.items()}
        columns[LENGTHS] = _lists(bounds, lengths.astype(np.int32))
        return pa.table(columns)

    def _labels(self, values: dict[str, Values], starts: np.ndarray) -> np.ndarray | None:
        """Return the labels per token, if any, with first ones masked: no token of the document
        predicts them.

        Makes them in `values` if only columns that mark targets are there, which it removes:
        trainers drop columns that they do not know.
        """
        key, ids = self.documents.label_key or "labels", values[IDS]
        masks = [name for name in COMPLETION_KEYS if name in values]
        if self.mask_first_label and masks and self.documents.label_key is None:
            kept = np.logical_and.reduce([np.asarray(values.pop(name)) for name in masks])
            made = np.where(kept, ids.astype(np.int64), IGNORED_LABEL)
            values[key] = made.astype(ids.dtype if ids.dtype.kind == "i" and ids.itemsize > 2 else np.int64)
        if key not in values:
            return None
        if self.mask_first_label:
            labels = values[key]
            if not (isinstance(labels, np.ndarray) and labels.dtype.kind == "i"):
                kind = labels.dtype if isinstance(labels, np.ndarray) else labels.type
                found = f"found {kind}, wanted signed ints, of which {IGNORED_LABEL} is no target"
                raise InvalidPacking(f"column {key!r}: {found}; cast it, or pass mask_first_label=False")
            if not labels.flags.writeable:
                values[key] = empty(len(labels), labels.dtype)
                values[key][:] = labels
            labels = values[key]
            labels[starts] = IGNORED_LABEL
        return values[key]


def nothing_left(counts: Counts) -> InvalidPacking:
    """Return the error about data that make no row."""
    if not counts.documents:
        return InvalidPacking("wanted at least one example, found an empty dataset")
    return InvalidPacking(f"no document is left of {counts.documents:,}: all are longer than max_length; raise it")


def _ways(documents: Documents) -> str:
    """Return the values of `overflow` that these documents allow, as an error names them."""
    if {*PICTURES} & {*documents.per_document}:
        return "'drop'"
    return "'truncate' or 'drop'" if documents.label_key in documents.per_document else ANY_WAY


def _weights(given: pa.Array, documents: np.ndarray) -> np.ndarray:
    """Return the weights of these documents; raise `InvalidPacking` unless they are numbers."""
    if given.null_count:
        index = int(documents[given.is_null().to_numpy(zero_copy_only=False).argmax()])
        raise invalid(index, DOCUMENT_WEIGHT, "found no value; fill it, or leave the example out", "column ")
    if not (pa.types.is_integer(given.type) or pa.types.is_floating(given.type) or pa.types.is_boolean(given.type)):
        raise InvalidPacking(f"column {DOCUMENT_WEIGHT!r}: wanted a number for each document, found {given.type}")
    return given.to_numpy(zero_copy_only=False)


def _lists(offsets: np.ndarray, values: Values) -> pa.Array:
    """Return values cut at these offsets, as one list each."""
    return pa.ListArray.from_arrays(_array(offsets.astype(np.int32)), _array(values))


def _array(values: Values) -> pa.Array:
    """Return an array of arrow; this does not read the ints and floats, as `pa.array` does."""
    if not isinstance(values, np.ndarray):
        return values
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


@dataclass
class Packing:
    """Options of `autopack.pack` by purpose: of plans, of carried columns, and of added columns."""

    max_length: int
    planned: dict[str, Any]
    carried: dict[str, Any]
    added: dict[str, Any]
    groups: str | bool = False
    warned: bool = False
    kinds: dict[str, str] | None = None
    """Kind of each column in the first buffer of a stream: "per token" or "per document"."""

    def plan(self, lengths: np.ndarray, ways: str = ANY_WAY, **changes: Any) -> Plan:
        """Return the plan of documents of these lengths; an error names the option of
        `autopack.pack` to change.

        If that is `overflow`, the error names the values `ways`.
        """
        try:
            if self.planned["overflow"] == "error" and self.planned["strategy"] != "fixed_length":
                fit(lengths, self.max_length, "error", ways)
            return plan(lengths, self.max_length, **self.planned | changes)
        except InvalidPacking as error:
            message = str(error).replace("lengths[", "example [")
            raise InvalidPacking(message) from error

    def rows(self, documents: Documents) -> Rows:
        """Return the rows of all documents of a dataset."""
        made = self.plan(documents.lengths, _ways(documents), **self._grouped(documents))
        lost = made.counts.truncated or made.counts.dropped
        logger.log(logging.WARNING if lost else logging.INFO, "Packed: %r", made)
        return Rows(documents, made, **self.added)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the rows of a buffer of examples, columns in and columns out, as
        `IterableDataset.map` calls it.

        They depend on the buffer alone, so that a resumed stream makes the same rows again.
        """
        given = {name: batch[name] for name in batch}
        left_out = self.carried["drop_columns"]
        for name, values in given.items():
            if name not in left_out and all(value is None for value in values):
                way = "whether it is a column of rows would depend on the buffer; fill it, or name it in drop_columns"
                raise InvalidPacking(f"column {name!r}: found no value in a buffer of {len(values)} examples; {way}")
        try:
            given, pictures = set_aside(given, left_out)
            documents = Documents(from_columns(given, **self.carried, read=self.groups), None, **self.carried)
            self._check_kinds(documents)
            seed = zlib.crc32(documents.lengths.tobytes(), int(self.planned["seed"]) & 0xFFFFFFFF)
            made = self.plan(documents.lengths, _ways(documents), seed=seed, **self._grouped(documents))
            if (made.counts.truncated or made.counts.dropped) and not self.warned:
                logger.warning("Packed: %r; buffers that follow are packed alike, and nothing more is said", made)
                self.warned = True
            if not len(made):
                return {}
            if self.planned["strategy"] not in ORDERED:  # a plan lists the longest documents first
                made = made.select(np.random.default_rng(seed).permutation(len(made)))
            return put_back(Rows(documents, made, **self.added).table().to_pydict(), pictures)
        except InvalidPacking as error:
            count = len(next(iter(given.values())))
            raise InvalidPacking(f"in a buffer of {count} examples, counted from its start: {error}") from error

    def _grouped(self, documents: Documents) -> dict[str, np.ndarray]:
        """Return the groups for a plan; rows leave their column out, unless it is labels or in
        `columns`."""
        found, name = groups_of(documents, self.groups), self.groups
        if name in documents.per_document and name not in (*LABEL_KEYS, *(self.carried["columns"] or ())):
            documents.per_document.remove(str(name))
        return found

    def _check_kinds(self, documents: Documents) -> None:
        """Raise if columns differ in kind from the first buffer, whose rows would not go with
        these."""
        found = dict.fromkeys(documents.per_token, "per token") | dict.fromkeys(documents.per_document, "per document")
        self.kinds = self.kinds or found
        for name in sorted(found.keys() | self.kinds.keys()):
            now, before = found.get(name, "absent"), self.kinds.get(name, "absent")
            if now != before:
                reason = f"found {now}, and {before} in the first buffer"
                raise InvalidPacking(f"column {name!r}: {reason}; make them alike, or name it in drop_columns")

"""Arrow tables of documents: make them of examples, and find columns per token and places of
tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from autopack.inspection.media import holds_media
from autopack.layout import LABEL_KEYS
from autopack.layout.ways import OF_ROWS
from autopack.packing.checks import (
    IDS,
    MASK,
    check_columns,
    invalid,
    no_examples,
    refuse_unlike,
    to_numpy,
    unusable,
    wrong_numbers,
    zeros,
)

Values = Any
"""An array: of numpy if the type allows it, else of arrow."""


class Documents:
    """Documents of an arrow table, one per row, without their padding; columns are read in place.

    The table is one of arrow or of datasets, whose tables are pickled as the path of their file.
    `chosen`, (documents,) int64, is the row of each document, or None for all rows in order.
    `drop_columns` are left out. `per_token` and `per_document` name the columns with one value
    of each. `pictures` are columns beside the table, which cannot hold them.
    """

    def __init__(
        self,
        table: Any,
        chosen: np.ndarray | None = None,
        drop_columns: Collection[str] = (),
        pictures: Mapping[str, Sequence[Any]] | None = None,
    ):
        self.table, self.pictures = table, pictures or {}
        self.chosen = np.arange(table.num_rows) if chosen is None else chosen
        names = [
            name
            for name in columns_kept(table.column_names, drop_columns)
            if name != IDS and not pa.types.is_null(table.schema.field(name).type)
        ]
        if not len(self.chosen):
            raise no_examples("wanted at least one example, found an empty dataset")
        # Of each row of the table: where its values start in a column, the token after its padding,
        # and its tokens.
        self._starts: dict[str, np.ndarray] = {}
        self._begins = zeros(table.num_rows)
        ids = table.schema.field(IDS).type
        if not _is_list(ids) or not pa.types.is_integer(_value_type(ids)):
            raise unusable(f"column 'input_ids': wanted a list of ints per example, found {ids}")
        self._sizes = self._lengths(IDS)
        self.per_token: list[str] = [IDS]
        self.per_document: list[str] = []
        for name in names:
            (self.per_token if self._is_per_token(name) else self.per_document).append(name)
        if MASK in self.per_token:
            self.per_token.remove(MASK)
            self._remove_padding()
        way = (
            "leave empty documents out, as by dataset.filter(lambda example: "
            "len(example['input_ids']) > 0)"
        )
        self._refuse(self._sizes == 0, IDS, f"found no tokens; {way}")

    @classmethod
    def of_dataset(cls, dataset: Any, drop_columns: Collection[str] = ()) -> Documents:
        """Return the documents of a `datasets.Dataset`."""
        indices = dataset._indices  # None for all rows of the table in order
        chosen = None if indices is None else indices.column(0).to_numpy().astype(np.int64)
        return cls(dataset.data, chosen, drop_columns)

    def __getstate__(self) -> dict[str, Any]:
        # Arrays of arrow are pickled with all that they hold, also where that is a file.
        return {k: v for k, v in self.__dict__.items() if k not in ("batches", "first_rows")}

    @cached_property
    def batches(self) -> list[pa.RecordBatch]:
        """Record batches of the table that have rows."""
        return [batch for batch in self.table.to_batches() if batch.num_rows]

    @cached_property
    def first_rows(self) -> np.ndarray:
        """First row of each batch in the table, (batches,) int64."""
        return np.cumsum([0, *(batch.num_rows for batch in self.batches[:-1])])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, (documents,) int64."""
        return self._sizes[self.chosen]

    @property
    def label_key(self) -> str | None:
        """Name of the column of labels; None if there is none."""
        return next((k for k in (*self.per_token, *self.per_document) if k in LABEL_KEYS), None)

    def values(
        self,
        documents: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        names: Collection[str] | None = None,
    ) -> dict[str, Values]:
        """Return the values of columns per token in parts of documents, end to end, by column.

        A part is `lengths` tokens of its document from token `starts` on. By default all columns
        per token are read. Ints and floats come as arrays of numpy.
        """
        rows = self.chosen[documents]
        made: dict[str, Values] = {}
        for name in self.per_token if names is None else names:
            begins = self._starts[name][rows] + self._begins[rows] + starts
            found = self._gathered(name, rows, begins, lengths)
            if isinstance(found, pa.Array):
                absent = found.is_null().to_numpy(zero_copy_only=False)
                reason = "found a token without a value; fill it, or name it in drop_columns"
                refuse_tokens(absent, documents, lengths, name, reason)
                found = found.to_numpy() if _is_number(found.type) else found
            made[name] = found
        return made

    def of_documents(self, name: str, documents: np.ndarray) -> pa.Array:
        """Return each of these documents' value in a column per document."""
        return self._gathered(name, self.chosen[documents])

    def _gathered(
        self,
        name: str,
        rows: np.ndarray,
        begins: np.ndarray | None = None,
        lengths: int | np.ndarray = 1,
    ) -> pa.Array:
        """Return a column's values in these rows, or parts of the lists in them, end to end.

        A part is `lengths` values from `begins` on, as numbered in the row's record batch.
        """
        batches = np.searchsorted(self.first_rows, rows, "right") - 1
        numbers = batches.tolist()
        arrays = {number: self.batches[number].column(name) for number in {*numbers}}
        if begins is None:
            begins = rows - self.first_rows[batches]
        else:
            arrays = {number: _as_list(column).values for number, column in arrays.items()}
            if all(_is_number(array.type) and not array.null_count for array in arrays.values()):
                # faster to cut
                arrays = {number: array.to_numpy() for number, array in arrays.items()}
        places = zip(numbers, begins.tolist(), (begins + lengths).tolist(), strict=True)
        parts = [arrays[number][begin:end] for number, begin, end in places]
        return (
            np.concatenate(parts) if isinstance(parts[0], np.ndarray) else pa.concat_arrays(parts)
        )

    def value_numbers(self, name: str) -> np.ndarray:
        """Return a number per document, equal for equal values of a column; -1 without a value."""
        if name not in self.table.column_names:
            raise wrong_numbers(
                f"groups: found no column {name!r} in {list(self.table.column_names)}; name another"
            )
        try:
            values = self.of_documents(name, np.arange(len(self.chosen))).dictionary_encode()
        except pa.ArrowNotImplementedError as error:
            raise wrong_numbers(
                f"groups: column {name!r} holds {self.table.schema.field(name).type}; wanted ints "
                "or text, one per document"
            ) from error
        return values.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

    def _refuse(self, wrong: np.ndarray, name: str, reason: str) -> None:
        """Raise `InvalidPacking` for the first document whose row in the table is `wrong`."""
        if (found := wrong[self.chosen]).any():
            raise invalid(int(found.argmax()), name, reason, "column ")

    def _lengths(self, name: str) -> np.ndarray:
        """Return the length of each list in a column, and note in `_starts` where they begin."""
        lists = [_as_list(batch.column(name)) for batch in self.batches]
        self._refuse(
            np.concatenate([each.is_null().to_numpy(zero_copy_only=False) for each in lists]),
            name,
            "found no value; fill it, or leave the example or column out",
        )
        offsets = [each.offsets.to_numpy().astype(np.int64) for each in lists]
        self._starts[name] = np.concatenate([o[:-1] for o in offsets])
        return np.concatenate([np.diff(o) for o in offsets])

    def _is_per_token(self, name: str) -> bool:
        """Return True if a column has a value per token; raise for lists of other lengths."""
        found = self.table.schema.field(name).type
        if not _is_list(found):
            return False
        value = _value_type(found)
        if name in LABEL_KEYS and pa.types.is_floating(value):
            return False  # the targets of a document, as the collator reads them
        while _is_list(value):
            value = _value_type(value)
        if not (_is_number(value) or pa.types.is_boolean(value) or pa.types.is_null(value)):
            return False  # text, whether or not there happen to be as many words as tokens
        lengths = self._lengths(name)
        wrong = lengths[self.chosen] != self.lengths
        if not wrong.any():
            return True
        if pa.types.is_null(value):
            return False  # empty lists throughout, of whatever they are in other data
        index = int(wrong.argmax())
        reason = (
            f"found {lengths[self.chosen[index]]} values for {self.lengths[index]} tokens, wanted "
            "one per token; name the column in drop_columns"
        )
        way = ", keep the pictures themselves, and give PackingCollator an image_processor"
        raise invalid(index, name, reason + way * holds_media(name), "column ")

    def _remove_padding(self) -> None:
        """Leave out zeros of the mask at both ends of each document; raise for other zeros."""
        parts = []
        for batch in self.batches:
            lists = _as_list(batch.column(MASK))
            mask = lists.flatten().to_numpy(zero_copy_only=False)
            bounds = lists.offsets.to_numpy().astype(np.int64)
            bounds -= bounds[0]
            real = np.append(np.flatnonzero(mask), 0)
            at = np.searchsorted(real[:-1], bounds)  # real tokens before each row
            odd = np.searchsorted(np.flatnonzero((mask != 0) & (mask != 1)), bounds)
            ends = real[at[1:] - 1] + 1 - bounds[:-1]
            parts.append([real[at[:-1]] - bounds[:-1], np.diff(at), ends, np.diff(odd)])
        begins, lengths, ends, odd = np.concatenate(parts, axis=1)
        self._refuse(
            odd > 0,
            MASK,
            "found values that are not 0 or 1, as segment ids of a packed row are; pack the "
            "documents themselves",
        )
        hole = (lengths > 0) & (ends - begins != lengths)
        self._refuse(hole, MASK, "found a zero between ones; take such tokens out")
        self._begins, self._sizes = begins, lengths


def refuse_tokens(
    wrong: np.ndarray, documents: np.ndarray, lengths: np.ndarray, name: str, reason: str
) -> None:
    """Raise `InvalidPacking` for the document of the first `wrong` token in parts, if any."""
    if wrong.any():
        part = np.searchsorted(np.cumsum(lengths), wrong.argmax(), "right")
        raise invalid(int(documents[part]), name, reason, "column ")


def columns_kept(names: Sequence[str], drop_columns: Collection[str]) -> list[str]:
    """Return the column names in their order, without `drop_columns`.

    Raises `InvalidPacking` unless they are columns of documents.
    """
    wanted = [name for name in names if name == IDS or name not in drop_columns]
    check_columns(wanted, "drop_columns")
    if missing := [name for name in drop_columns if name not in names]:
        raise unusable(
            f"drop_columns: found no column {missing[0]!r} in {list(names)}; name others"
        )
    if packed := [name for name in wanted if name in OF_ROWS]:
        raise unusable(
            f"found a column {packed[0]!r}, so the examples are packed rows; pack the documents "
            "themselves; or name it in drop_columns if each example is one document"
        )
    return wanted


def _is_list(kind: pa.DataType) -> bool:
    """Return True for an arrow type of lists, also of a fixed size, or of datasets' arrays."""
    kind = getattr(kind, "storage_type", kind)
    return isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


def _is_number(kind: pa.DataType) -> bool:
    """Return True for an arrow type of integers or floats."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of an arrow type of lists."""
    return getattr(kind, "storage_type", kind).value_type


def _as_list(array: pa.Array) -> pa.Array:
    """Return an arrow array of lists, of a fixed size or an extension too, as one with offsets."""
    array = getattr(array, "storage", array)
    is_fixed = pa.types.is_fixed_size_list(array.type)
    return array.cast(pa.large_list(array.type.value_type)) if is_fixed else array


def columns_of(examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of examples, a list by key; raise `InvalidPacking` if one lacks a key."""
    if not examples:
        raise no_examples("wanted at least one example, found an empty list")
    refuse_unlike(examples, (), "add it", "column ")
    return {name: [example[name] for example in examples] for name in examples[0]}


def from_columns(values: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Return an arrow table of columns; raise `InvalidPacking` for values that make no column."""
    made = {}
    for name, column in values.items():
        try:
            read = (to_numpy(value) for value in column)
            # Arrow takes arrays of one axis.
            lists = [v.tolist() if isinstance(v, np.ndarray) and v.ndim != 1 else v for v in read]
            made[name] = pa.array(lists, from_pandas=False)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise unusable(
                f"column {name!r}: found values that make no column ({error}); fix them, or name "
                "it in drop_columns"
            ) from error
    return pa.table(made)

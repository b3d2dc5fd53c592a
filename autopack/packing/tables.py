"""Examples in Python, as lists of mappings or as a batch of columns, made into an arrow table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from autopack.errors import InvalidPacking
from autopack.packing.columns import IDS, MASK, invalid_column
from autopack.packing.lengths import to_numpy


def from_examples(
    examples: Sequence[Mapping[str, Any]], columns: Collection[str] | None, drop_columns: Collection[str]
) -> pa.Table:
    """The examples as a table; raises `InvalidPacking` where one lacks a key, or values of one key differ in type."""
    if not examples:
        raise InvalidPacking("wanted at least one example, found an empty list")
    names = list(examples[0])
    for index, example in enumerate(examples):
        if example.keys() != examples[0].keys():
            name = min(example.keys() ^ examples[0].keys(), key=str)
            lacking, other = (index, 0) if name in names else (0, index)
            raise invalid_column(lacking, name, f"not found, but example {other} has it; add it")
    return from_columns({name: [example[name] for example in examples] for name in names}, columns, drop_columns)


def from_columns(
    values: Mapping[str, Sequence[Any]], columns: Collection[str] | None, drop_columns: Collection[str]
) -> pa.Table:
    """A table of lists, arrays or tensors; columns that are not to be carried have no values in it.

    Examples whose `input_ids` are an array of shape (1, T), as tokenizers give with `return_tensors`, lose that axis.
    """
    rows = [hasattr(ids, "shape") and len(ids.shape) == 2 and ids.shape[0] == 1 for ids in values.get(IDS, ())]
    made = {}
    for name, column in values.items():
        if name in drop_columns or (columns is not None and name not in (IDS, MASK, *columns)):
            made[str(name)] = pa.nulls(len(column))
            continue
        if any(rows):
            column = [v[0] if row and hasattr(v, "shape") else v for v, row in zip(column, rows, strict=True)]
        try:
            made[str(name)] = pa.array([_value(v) for v in column], from_pandas=False)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            reason = f"found values that make no column ({error}); fix them, or name it in drop_columns"
            raise InvalidPacking(f"column {name!r}: {reason}") from error
    return pa.table(made)


def _value(value: Any) -> Any:
    value = to_numpy(value)
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value

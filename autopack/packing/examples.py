"""Examples in Python, as lists of mappings or as a batch of columns, made into an arrow table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from autopack.errors import InvalidPacking
from autopack.packing.documents import IDS, MASK

__all__ = ["as_table", "from_columns", "wanted"]


def wanted(names: Iterable[str], columns: Collection[str] | None, drop_columns: Collection[str]) -> set[str]:
    """The columns that are read when `columns` are carried and `drop_columns` are not."""
    return {name for name in names if name in (IDS, MASK) or columns is None or name in columns} - {*drop_columns}


def as_table(
    examples: Sequence[Mapping[str, Any]], columns: Collection[str] | None, drop_columns: Collection[str]
) -> pa.Table:
    """The examples as a table; raises `InvalidPacking` where one lacks a key, or values of one key differ in type."""
    if not examples:
        raise InvalidPacking("wanted at least one example, found an empty list")
    names = list(examples[0])
    for index, example in enumerate(examples):
        if example.keys() != examples[0].keys():
            name = next(iter(example.keys() ^ examples[0].keys()))
            lacking, other = (index, 0) if name in names else (0, index)
            raise InvalidPacking(f"example {lacking}, column {name!r}: not found, but example {other} has it; add it")
    table = {name: [example[name] for example in examples] for name in names}
    return from_columns(table, wanted(names, columns, drop_columns))


def from_columns(columns: Mapping[str, Sequence[Any]], wanted: Collection[str] | None = None) -> pa.Table:
    """A table of these columns, of lists, arrays or tensors; those that are not wanted have no values in it.

    Examples whose `input_ids` are an array of shape (1, T), as tokenizers give with `return_tensors`, lose that axis.
    """
    rows = [hasattr(ids, "shape") and len(ids.shape) == 2 and ids.shape[0] == 1 for ids in columns.get(IDS, ())]
    made = {}
    for name, values in columns.items():
        if wanted is not None and name not in wanted:
            made[str(name)] = pa.nulls(len(values))
            continue
        if any(rows):
            values = [v[0] if row and hasattr(v, "shape") else v for v, row in zip(values, rows, strict=True)]
        try:
            made[str(name)] = pa.array([_value(v) for v in values], from_pandas=False)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            reason = f"found values that make no column ({error}); fix them, or name it in drop_columns"
            raise InvalidPacking(f"column {name!r}: {reason}") from error
    return pa.table(made)


def _value(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value

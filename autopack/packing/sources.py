"""Lengths of documents from wherever they are: arrays, datasets, files; tokens or text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.lengths import read

__all__ = ["lengths_of"]

COLUMNS = ("input_ids", "length", "lengths")
"""The columns that are looked for."""
BATCH = 1000
"""Texts that are tokenized at a time."""

Counter = Callable[[Sequence[str]], list[int]]


def lengths_of(data: Any, column: str | None = None, tokenizer: Any = None) -> np.ndarray:
    """Tokens of each document, (documents,) int64; see `autopack.estimate`.

    Raises `InvalidPacking` for data that holds none.
    """
    count = _counter(tokenizer)
    if isinstance(data, (str, PathLike)):
        return _of_file(Path(data), column, count)
    if hasattr(data, "column_names"):
        return _of_dataset(data, column, count)
    if isinstance(data, Mapping) or (isinstance(data, (list, tuple)) and data and not np.isscalar(data[0])):
        return _of_json(data, column, count, "the examples")
    return read(data)


def _counter(tokenizer: Any) -> Counter | None:
    """A function from texts to their tokens."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, (str, PathLike)):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise InvalidPacking(f"tokenizer {str(tokenizer)!r}: cannot be loaded: {error}") from error
    return lambda texts: [len(ids) for ids in tokenizer(list(texts))["input_ids"]]


def _of_file(path: Path, column: str | None, count: Counter | None) -> np.ndarray:
    readers = {".json": _of_json_file, ".jsonl": _of_json_lines, ".npy": _of_npy, ".parquet": _of_parquet}
    if not path.exists():
        raise InvalidPacking(f"{path}: no such file")
    if path.is_dir():
        try:
            from datasets import load_from_disk
        except ImportError as error:
            raise InvalidPacking(f'{path}: a folder needs datasets: pip install "autopack[data]"') from error
        try:
            return _of_dataset(load_from_disk(str(path)), column, count)
        except FileNotFoundError as error:
            raise InvalidPacking(f"{path}: wanted a dataset that save_to_disk wrote: {error}") from error
    if path.suffix not in readers:
        raise InvalidPacking(f"{path}: wanted one of {', '.join(readers)}, or a folder of a dataset")
    try:
        return readers[path.suffix](path, column, count)
    except InvalidPacking as error:
        raise InvalidPacking(f"{path}: {error}") from error
    except (ValueError, OSError) as error:  # what json, numpy and arrow raise for files that are not theirs
        raise InvalidPacking(f"{path}: cannot be read: {error}") from error


def _of_json_file(path: Path, column: str | None, count: Counter | None) -> np.ndarray:
    return _of_json(json.loads(path.read_text(encoding="utf-8")), column, count, "the file")


def _of_json_lines(path: Path, column: str | None, count: Counter | None) -> np.ndarray:
    with path.open(encoding="utf-8") as lines:
        return _of_json([json.loads(line) for line in lines if line.strip()], column, count, "the file")


def _of_npy(path: Path, column: str | None, count: Counter | None) -> np.ndarray:
    return read(np.load(path, mmap_mode="r", allow_pickle=False))


def _of_parquet(path: Path, column: str | None, count: Counter | None) -> np.ndarray:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InvalidPacking('parquet needs pyarrow: pip install "autopack[data]"') from error
    with pq.ParquetFile(path) as file:
        name = _chosen(file.schema_arrow.names, column, count)
        return _joined(_of_column(batch.column(0), name, count) for batch in file.iter_batches(columns=[name]))


def _of_json(data: Any, column: str | None, count: Counter | None, where: str) -> np.ndarray:
    """Of a list of lengths or examples, or a mapping of columns."""
    if isinstance(data, Mapping):
        data = data[_chosen(list(data), column, count)]
    elif data and isinstance(data[0], Mapping):
        name = _chosen(list(data[0]), column, count)
        missing = next((i for i, example in enumerate(data) if example.get(name) is None), None)
        if missing is not None:
            raise InvalidPacking(f"example {missing} of {where}: found no {name!r}, which example 0 has")
        data = [example[name] for example in data]
    if not isinstance(data, (list, tuple)) or not data:
        raise InvalidPacking(f"wanted lengths or examples in {where}, found none")
    if isinstance(data[0], str):
        return read(_of_texts(data, count))
    return read(data if np.isscalar(data[0]) else [len(values) for values in data])


def _of_dataset(dataset: Any, column: str | None, count: Counter | None) -> np.ndarray:
    names = dataset.column_names
    if not isinstance(names, list) or not hasattr(dataset, "data"):
        way = "pass one split of it" if isinstance(names, dict) else "pass a Dataset, such as a sample of the stream"
        raise InvalidPacking(f"wanted a Dataset, found {type(dataset).__name__}; {way}")
    name = _chosen(names, column, count)
    if name == "input_ids":
        from autopack.packing.documents import Documents

        chosen = None if dataset._indices is None else dataset._indices.column(0).to_numpy().astype(np.int64)
        return read(Documents(dataset.data, chosen, (), ()).lengths)
    batches = dataset.select_columns([name]).with_format("arrow").iter(BATCH)
    return _joined(_of_column(chunk, name, count) for batch in batches for chunk in batch.column(name).chunks)


def _of_column(values: Any, name: str, count: Counter | None) -> np.ndarray:
    """Lengths of an arrow array: of ints, lists or text."""
    import pyarrow as pa

    if values.null_count:
        raise InvalidPacking(f"column {name!r}: found {values.null_count:,} examples without a value; leave them out")
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return np.array(_of_texts(values.to_pylist(), count))
    if hasattr(values.type, "value_type"):
        return values.value_lengths().to_numpy()
    if not pa.types.is_integer(values.type):
        raise InvalidPacking(f"column {name!r}: wanted ints, lists or text, found {values.type}")
    return values.to_numpy(zero_copy_only=False)


def _of_texts(texts: Sequence[str], count: Counter | None) -> list[int]:
    if count is None:
        raise InvalidPacking("found text, whose tokens are to be counted; name a tokenizer")
    return [length for start in range(0, len(texts), BATCH) for length in count(texts[start : start + BATCH])]


def _chosen(names: Sequence[str], column: str | None, count: Counter | None) -> str:
    """The column that holds lengths, tokens or text."""
    wanted = (column,) if column is not None else (*COLUMNS, "text") if count is None else ("text",)
    found = next((name for name in wanted if name in names), None)
    if found is None:
        raise InvalidPacking(f"found no column {' or '.join(map(repr, wanted))} in {list(names)}; name the column")
    return found


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    parts: Iterator[np.ndarray] = (part for part in arrays if len(part))
    found = list(parts)
    return read(np.concatenate(found) if found else np.zeros(0, np.int64))

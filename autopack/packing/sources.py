"""Lengths of documents from wherever they are: arrays, datasets, files; tokens or text."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.checks import IDS
from autopack.packing.lengths import read

BATCH = 1000
"""Texts that are tokenized at a time."""
FILES = (".json", ".jsonl", ".npy", ".parquet")


def lengths_of(data: Any, column: str | None = None, tokenizer: Any = None) -> np.ndarray:
    """Tokens of each document, (documents,) int64; see `autopack.estimate`.

    Raises `InvalidPacking` for data that holds none.
    """
    if isinstance(tokenizer, (str, PathLike)):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise InvalidPacking(f"tokenizer {str(tokenizer)!r}: cannot be loaded: {error}") from error
    reader = _Reader(column, tokenizer)
    if isinstance(data, (str, PathLike)):
        if not str(data):
            raise InvalidPacking("wanted the path of a file or folder, found an empty one")
        return reader.of_file(Path(data))
    if hasattr(data, "column_names"):
        return reader.of_dataset(data)
    if isinstance(data, Mapping) or (isinstance(data, (list, tuple)) and data and not np.isscalar(data[0])):
        return reader.of_json(data, "the examples")
    return read(data)


def documents_of(data: Any) -> Any:
    """The documents of data that holds tokens (`autopack.packing.documents.Documents`); see `autopack.estimate`."""
    try:
        from autopack.packing.documents import Documents, columns_of, from_columns
    except ImportError as error:
        raise ImportError('groups need pyarrow: pip install "autopack[data]"') from error
    if isinstance(data, (str, PathLike)):
        path = Path(data)
        if path.is_dir():
            from datasets import load_from_disk

            data = load_from_disk(str(path))
        elif path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return Documents(pq.read_table(path), None, (), ())
        elif path.suffix in (".json", ".jsonl"):
            with path.open(encoding="utf-8") as file:
                lines = path.suffix == ".jsonl"
                data = [json.loads(line) for line in file if line.strip()] if lines else json.load(file)
    if hasattr(data, "column_names"):
        return Documents.of_dataset(data, (), ())
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], Mapping):
        data = columns_of(data)
    if not isinstance(data, Mapping) or IDS not in data:
        raise InvalidPacking(f"groups: wanted examples with a column {IDS!r}, whose tokens say what begins alike")
    return Documents(from_columns(data, None, ()), None, (), ())


@dataclass
class _Reader:
    """Reads lengths by the column that was named, and with the tokenizer that was given; either may be None."""

    column: str | None
    tokenizer: Any

    def of_file(self, path: Path) -> np.ndarray:
        if not path.exists():
            raise InvalidPacking(f"{path}: no such file; check the path")
        if path.is_dir():
            try:
                from datasets import load_from_disk
            except ImportError as error:
                raise InvalidPacking(f'{path}: a folder needs datasets: pip install "autopack[data]"') from error
            try:
                return self.of_dataset(load_from_disk(str(path)))
            except FileNotFoundError as error:
                raise InvalidPacking(f"{path}: wanted a dataset that save_to_disk wrote: {error}") from error
        if path.suffix not in FILES:
            raise InvalidPacking(f"{path}: wanted one of {', '.join(FILES)}, or a folder of a dataset")
        try:
            if path.suffix == ".npy":
                return self.of_npy(path)
            if path.suffix == ".parquet":
                return self.of_parquet(path)
            with path.open(encoding="utf-8") as file:
                lines = path.suffix == ".jsonl"
                data = [json.loads(line) for line in file if line.strip()] if lines else json.load(file)
            return self.of_json(data, "the file")
        except InvalidPacking as error:
            raise InvalidPacking(f"{path}: {error}") from error
        # What json, numpy and arrow raise for files that are not theirs, and examples that are nothing of the kind.
        except (ValueError, OSError, EOFError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidPacking(f"{path}: cannot be read: {error}") from error

    def of_npy(self, path: Path) -> np.ndarray:
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            # Of bytes that are not its own numpy says that they are pickled, and can be loaded unsafely: a guess.
            raise InvalidPacking("wanted an array of numbers that numpy.save wrote, found another file") from error
        if not isinstance(found, np.ndarray):
            found.close()
            raise InvalidPacking("wanted one array, found several (.npz); save that of the lengths by numpy.save")
        return read(found)

    def of_parquet(self, path: Path) -> np.ndarray:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise InvalidPacking('parquet needs pyarrow: pip install "autopack[data]"') from error
        with pq.ParquetFile(path) as file:
            name = self.chosen(file.schema_arrow.names)
            return self.of_columns(name, (batch.column(0) for batch in file.iter_batches(columns=[name])))

    def of_json(self, data: Any, where: str) -> np.ndarray:
        """Of a list of lengths or examples, or a mapping of columns."""
        if isinstance(data, Mapping):
            data = data[self.chosen(list(data))]
        if not isinstance(data, (list, tuple)) or not data:
            found = "none" if data is None or isinstance(data, (list, tuple)) else repr(data)
            raise InvalidPacking(f"wanted a list of lengths or examples in {where}, found {found:.60}")
        if isinstance(data[0], Mapping):
            name = self.chosen(list(data[0]))
            other = next((i for i, example in enumerate(data) if not isinstance(example, Mapping)), None)
            if other is not None:
                raise InvalidPacking(f"example {other} of {where}: wanted a mapping, found {data[other]!r:.60}")
            missing = next((i for i, example in enumerate(data) if example.get(name) is None), None)
            if missing is not None:
                raise InvalidPacking(f"example {missing} of {where}: found no {name!r}, which example 0 has")
            data = [example[name] for example in data]
        if isinstance(data[0], str):
            return read(self.of_texts(data))
        if np.isscalar(data[0]):
            return read(data)
        other = next((i for i, values in enumerate(data) if not isinstance(values, (list, tuple))), None)
        if other is not None:
            raise InvalidPacking(f"example {other} of {where}: wanted a list of tokens, found {data[other]!r:.60}")
        return read([len(values) for values in data])

    def of_dataset(self, dataset: Any) -> np.ndarray:
        names = dataset.column_names
        if not isinstance(names, list) or not hasattr(dataset, "data"):
            way = "one split of it" if isinstance(names, dict) else "a Dataset, such as a sample of the stream"
            raise InvalidPacking(f"wanted a Dataset, found {type(dataset).__name__}; pass {way}")
        name = self.chosen(names)
        if name == IDS:
            from autopack.packing.documents import Documents

            return read(Documents.of_dataset(dataset, (), ()).lengths)
        batches = dataset.select_columns([name]).with_format("arrow").iter(BATCH)
        return self.of_columns(name, (chunk for batch in batches for chunk in batch.column(name).chunks))

    def of_columns(self, name: str, arrays: Iterable[Any]) -> np.ndarray:
        """Of arrow arrays of ints, lists or text."""
        import pyarrow as pa

        found = []
        for values in filter(len, arrays):
            if values.null_count:
                raise InvalidPacking(f"column {name!r}: {values.null_count:,} examples have no value; leave them out")
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                found.append(np.array(self.of_texts(values.to_pylist())))
            elif hasattr(values.type, "value_type"):
                found.append(values.value_lengths().to_numpy())
            elif pa.types.is_integer(values.type):
                found.append(values.to_numpy(zero_copy_only=False))
            else:
                raise InvalidPacking(f"column {name!r}: wanted ints, lists or text, found {values.type}")
        return read(np.concatenate(found) if found else [])

    def of_texts(self, texts: Sequence[str]) -> list[int]:
        if self.tokenizer is None:
            raise InvalidPacking("found text, whose tokens are to be counted; name a tokenizer")
        batches = (list(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH))
        return [len(ids) for batch in batches for ids in self.tokenizer(batch)["input_ids"]]

    def chosen(self, names: Sequence[str]) -> str:
        """The column that holds lengths, tokens or text."""
        unnamed = ("text",) if self.tokenizer is not None else (IDS, "length", "lengths", "text")
        wanted = unnamed if self.column is None else (self.column,)
        found = next((name for name in wanted if name in names), None)
        if found is None:
            raise InvalidPacking(f"found no column {' or '.join(map(repr, wanted))} in {list(names)}; name the column")
        return found

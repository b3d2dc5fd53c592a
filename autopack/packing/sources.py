"""Lengths of documents from any source: arrays, datasets, files; tokens or text."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.checks import IDS, is_int
from autopack.packing.lengths import read, to_numpy

BATCH = 1000
"""Texts that are tokenized at a time."""
FILES = (".json", ".jsonl", ".npy", ".parquet")


def lengths_of(data: Any, column: str | Sequence[str] | None = None, tokenizer: Any = None) -> np.ndarray:
    """Return tokens of each document, (documents,) int64; see `autopack.estimate`.

    Raises `InvalidPacking` for data that holds none.
    """
    if isinstance(tokenizer, (str, PathLike)):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise InvalidPacking(f"tokenizer {str(tokenizer)!r}: cannot be loaded: {error}") from error
    reader = _Reader((column,) if isinstance(column, str) else tuple(column or ()), tokenizer)
    if isinstance(data, (str, PathLike)):
        if not str(data):
            raise InvalidPacking("wanted the path of a file or folder, found an empty one")
        return reader.of_file(Path(data))
    if hasattr(data, "column_names"):
        return reader.of_dataset(data)
    if isinstance(data, Mapping) or (isinstance(data, (list, tuple)) and data and _kind(data[0]) != LENGTH):
        return reader.of_json(data, "the examples")
    return read(data)


def documents_of(data: Any) -> Any:
    """Return the documents of data that holds tokens (`autopack.packing.documents.Documents`).

    See `autopack.estimate`.
    """
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
    """Reader of lengths by the named columns, which add up, and with the given tokenizer, or
    None."""

    columns: tuple[str, ...]
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
            names = self.chosen(file.schema_arrow.names)
            return self.of_batches(names, file.iter_batches(columns=names))

    def of_json(self, data: Any, where: str) -> np.ndarray:
        """Return the lengths in a list of lengths or examples, or in a mapping of columns."""
        if isinstance(data, Mapping):
            columns = [data[name] for name in self.chosen(list(data))]
        elif isinstance(data, (list, tuple)) and data and isinstance(data[0], Mapping):
            names = self.chosen(list(data[0]))
            other = next((i for i, example in enumerate(data) if not isinstance(example, Mapping)), None)
            if other is not None:
                raise InvalidPacking(f"example {other} of {where}: wanted a mapping, found {data[other]!r:.60}")
            missing = next(((i, n) for i, e in enumerate(data) for n in names if e.get(n) is None), None)
            if missing is not None:
                place, name = missing
                raise InvalidPacking(f"example {place} of {where}: wanted {name!r}, as example 0 has it, found none")
            columns = [[example[name] for example in data] for name in names]
        else:
            columns = [data]
        for values in columns:
            if not isinstance(values, (list, tuple)) or not values:
                found = "none" if values is None or isinstance(values, (list, tuple)) else repr(values)
                raise InvalidPacking(f"wanted a list of lengths or examples in {where}, found {found:.60}")
        return _added([self.of_values(values, where) for values in columns])

    def of_dataset(self, dataset: Any) -> np.ndarray:
        names = dataset.column_names
        if not isinstance(names, list) or not hasattr(dataset, "data"):
            way = "one split of it" if isinstance(names, dict) else "a Dataset, such as a sample of the stream"
            raise InvalidPacking(f"wanted a Dataset, found {type(dataset).__name__}; pass {way}")
        chosen = self.chosen(names)
        if chosen == [IDS]:
            from autopack.packing.documents import Documents

            return read(Documents.of_dataset(dataset, (), ()).lengths)
        return self.of_batches(chosen, dataset.select_columns(chosen).with_format("arrow").iter(BATCH))

    def of_batches(self, names: Sequence[str], batches: Iterable[Any]) -> np.ndarray:
        """Return the lengths in tables or batches of arrow."""
        found: dict[str, list[Any]] = {name: [] for name in names}
        for batch in batches:
            for name in names:
                found[name].append(self.of_array(name, batch.column(name)))
        return _added([np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in found.values()])

    def of_array(self, name: str, values: Any) -> Any:
        """Return the lengths in an array of arrow.

        Anything but ints and lists of ints is read as Python has it.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if values.null_count:
            raise InvalidPacking(f"column {name!r}: {values.null_count:,} examples have no value; leave them out")
        if pa.types.is_integer(values.type):
            return values.to_numpy()
        if (
            pa.types.is_integer(getattr(values.type, "value_type", pa.null()))
            and not pc.list_flatten(values).null_count
        ):
            return pc.list_value_length(values).to_numpy()
        return self.of_values(values.to_pylist(), f"column {name!r}")

    def of_values(self, values: Sequence[Any], where: str) -> Any:
        """Return the tokens of each value: an int is their number, lists of ints are counted, text
        is tokenized.

        Messages of a chat are tokenized as text.
        """
        kinds = [_kind(value) for value in values]
        other = next((i for i, kind in enumerate(kinds) if kind is None or kind != kinds[0]), None)
        if other is not None:
            wanted = kinds[0] or f"{LENGTH}, {TOKENS}, {TEXT} or {MESSAGES}"
            raise InvalidPacking(f"example {other} of {where}: wanted {wanted}, found {values[other]!r:.60}")
        if kinds[:1] == [LENGTH]:
            return values
        return [len(ids) for ids in (self._tokenized(values, kinds[0]) if kinds[0] != TOKENS else values)]

    def _tokenized(self, values: Sequence[Any], kind: str | None) -> Iterator[Sequence[int]]:
        if self.tokenizer is None:
            raise InvalidPacking(f"found {kind}, whose tokens are to be counted; name a tokenizer: tokenizer=NAME")
        options: dict[str, Any] = {}
        if kind == MESSAGES:
            options["add_special_tokens"] = False  # the template has them
            try:
                values = [self.tokenizer.apply_chat_template(list(each), tokenize=False) for each in values]
            except Exception as error:  # templates are programs
                raise InvalidPacking(
                    f"found {kind}, and the tokenizer has no template for them: {error}; use one that has"
                ) from error
        for start in range(0, len(values), BATCH):
            yield from self.tokenizer(list(values[start : start + BATCH]), **options)["input_ids"]

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return the columns that hold lengths, tokens, text or messages."""
        unnamed = ("text", "messages") if self.tokenizer is not None else (IDS, "length", "lengths", "text")
        found = [name for name in self.columns or unnamed if name in names]
        if not found or (self.columns and len(found) < len(self.columns)):
            wanted = [name for name in self.columns if name not in names] or unnamed
            raise InvalidPacking(f"found no column {' or '.join(map(repr, wanted))} in {list(names)}; name the column")
        return found if self.columns else found[:1]


LENGTH, TOKENS, TEXT, MESSAGES = "a length", "a list of token ids", "text", "messages with role and content"


def _kind(value: Any) -> str | None:
    """Return the kind of a value; None if it has no tokens to count."""
    value = to_numpy(value)
    if isinstance(value, np.ndarray):
        return TOKENS if value.ndim == 1 and value.dtype.kind in "iu" else None
    if isinstance(value, (list, tuple)):
        if all(map(is_int, value)):
            return TOKENS
        return MESSAGES if all(map(_is_message, value)) else None
    return TEXT if isinstance(value, str) else LENGTH if np.isscalar(value) else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content") or "", str)


def _added(columns: list[Any]) -> np.ndarray:
    """Return the sum of the columns' lengths; raise `InvalidPacking` if one of them has none."""
    if len(columns) == 1:
        return read(columns[0])
    sizes = {len(values) for values in columns}
    if len(sizes) > 1:
        raise InvalidPacking(f"wanted columns of as many examples each, found {sorted(sizes)}")
    for values in columns:
        read(np.where(np.equal(values, 0), 1, values))  # a prompt or a completion may be empty, not both
    return read(np.sum(columns, axis=0))

"""Lengths of documents from any source: arrays, datasets, files; tokens or text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.checks import IDS, MASK, in_the_whole, is_int
from autopack.packing.lengths import read, to_numpy

BATCH = 1000
"""Examples of a data set that are read at a time, and texts that are tokenized at a time."""
FILES = (".json", ".jsonl", ".npy", ".parquet")
LENGTH, TOKENS, TEXT, MESSAGES = "a length", "a list of token ids", "text", "messages with role and content"


def lengths_of(data: Any, column: str | Sequence[str] | None = None, tokenizer: Any = None) -> np.ndarray:
    """Return tokens of each document, (documents,) int64; see `autopack.estimate`.

    Raises `InvalidPacking` for data that holds none.
    """
    if isinstance(tokenizer, (str, PathLike)):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise InvalidPacking(
                f"tokenizer {str(tokenizer)!r}: cannot be loaded: {error}", code="tokenizer"
            ) from error
    named = (column,) if isinstance(column, str) else tuple(column or ())
    return _read(data, lambda opened: _lengths(opened, named, tokenizer))


def documents_of(data: Any) -> Any:
    """Return the documents of data that holds tokens (`autopack.packing.documents.Documents`).

    See `autopack.estimate`.
    """
    return _read(data, _documents)


def _read(data: Any, reader: Any) -> Any:
    """Return what a reader makes of data, opened if it is a path; its errors then name the path."""
    if not isinstance(data, (str, PathLike)):
        return reader(_columns(data))
    if not str(data):
        raise InvalidPacking("wanted the path of a file or folder, found an empty one", code="bad-file")
    path = Path(data)
    try:
        return reader(_columns(_open(path)))
    except InvalidPacking as error:
        raise InvalidPacking(f"{path}: {error.message}", code=error.code) from error
    except ImportError as error:
        raise InvalidPacking(
            f'{path}: needs {error.name}: pip install "autopack[data]"', code="missing-package"
        ) from error
    # What json, numpy and arrow raise for files that are not theirs, and examples that are nothing of the kind.
    except (ValueError, OSError, EOFError, BadZipFile, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidPacking(f"{path}: cannot be read: {error}", code="bad-file") from error


def _open(path: Path) -> Any:
    """Return what a file or folder holds; a file of parquet is not read yet."""
    if not path.exists():
        raise InvalidPacking("no such file; check the path", code="bad-file")
    if path.is_dir():
        from datasets import load_from_disk

        try:
            return load_from_disk(str(path))
        except FileNotFoundError as error:
            raise InvalidPacking(f"wanted a dataset that save_to_disk wrote: {error}", code="bad-file") from error
    if path.suffix not in FILES:
        raise InvalidPacking(f"wanted one of {', '.join(FILES)}, or a folder of a dataset", code="bad-file")
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.ParquetFile(path)
    if path.suffix == ".npy":
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, BadZipFile) as error:
            # Of bytes that are not its own numpy says that they are pickled, and can be loaded unsafely: a guess.
            raise InvalidPacking(
                "wanted an array of numbers that numpy.save wrote, found another file", code="bad-file"
            ) from error
        if not isinstance(found, np.ndarray):
            found.close()
            raise InvalidPacking(
                "wanted one array, found several (.npz); save that of the lengths by numpy.save", code="bad-file"
            )
        return found
    with path.open(encoding="utf-8") as file:
        found = [json.loads(line) for line in file if line.strip()] if path.suffix == ".jsonl" else json.load(file)
    if not isinstance(found, (list, Mapping)):
        raise InvalidPacking(f"wanted a list of lengths or examples, found {found!r:.60}", code="no-examples")
    return found


@dataclass
class _Opened:
    """Columns by name: lists in memory, or a file of parquet or a data set, which arrow reads."""

    names: list[str]
    source: Any

    @property
    def is_dataset(self) -> bool:
        return hasattr(self.source, "column_names")

    def batches(self, names: list[str]) -> Iterable[Any]:
        """Return tables or batches of arrow with these columns."""
        if self.is_dataset:
            return self.source.select_columns(names).with_format("arrow").iter(BATCH)
        return self.source.iter_batches(columns=names)


def _columns(data: Any) -> Any:
    """Return data with columns as `_Opened`; anything else, which is lengths, as it is."""
    if hasattr(data, "column_names"):
        names = data.column_names
        if not isinstance(names, list) or not hasattr(data, "data"):
            way = "one split of it" if isinstance(names, dict) else "a Dataset, such as a sample of the stream"
            raise InvalidPacking(f"wanted a Dataset, found {type(data).__name__}; pass {way}", code="no-examples")
        return _Opened(names, data)
    if hasattr(data, "schema_arrow"):
        return _Opened(data.schema_arrow.names, data)
    if isinstance(data, (list, tuple)) and data and _kind(data[0]) != LENGTH:
        if not isinstance(data[0], Mapping):
            return _Opened([""], {"": data})
        for index, example in enumerate(data):
            if not isinstance(example, Mapping):
                raise InvalidPacking(f"example {index}: wanted a mapping, found {example!r:.60}", code="unusable-data")
        data = {name: [example.get(name) for example in data] for name in data[0]}
    return _Opened(list(data), data) if isinstance(data, Mapping) else data


def _lengths(data: Any, named: Sequence[str], tokenizer: Any) -> np.ndarray:
    """Return tokens of each document; if columns are `named`, those of all these together."""
    if not isinstance(data, _Opened):
        return read(data)
    names = data.names if data.names == [""] else _chosen(data.names, named, tokenizer)
    if names == [IDS] and data.is_dataset:
        return _documents(data).lengths
    if not isinstance(data.source, Mapping):
        found = zip(*_of_batches(data, names, tokenizer), strict=True)
        return _added([np.concatenate(parts) for parts in found] or [[]])
    for name in names:
        values = data.source[name]
        if not isinstance(values, (list, tuple)) or not values:
            raise InvalidPacking(f"wanted a list of lengths or examples, found {values!r:.60}", code="no-examples")
    if names == [IDS] and MASK in data.names:
        return read([int(np.count_nonzero(to_numpy(mask))) for mask in data.source[MASK]])
    return _added([_of_values(data.source[name], tokenizer) for name in names])


def _documents(data: Any) -> Any:
    """Return the documents of columns, of which `input_ids` and `attention_mask` are read."""
    try:
        from autopack.packing.documents import Documents, from_columns
    except ImportError as error:
        raise ImportError('groups need pyarrow: pip install "autopack[data]"') from error
    if not isinstance(data, _Opened) or IDS not in data.names:
        raise InvalidPacking(
            f"groups: wanted examples with a column {IDS!r}, whose tokens say what begins alike", code="unusable-data"
        )
    drop_columns = [name for name in data.names if name not in (IDS, MASK)]
    if data.is_dataset:
        return Documents.of_dataset(data.source, drop_columns)
    table = from_columns(data.source) if isinstance(data.source, Mapping) else data.source.read()
    return Documents(table, None, drop_columns)


def _of_batches(data: _Opened, names: list[str], tokenizer: Any) -> Iterator[list[Any]]:
    """Yield the lengths in each of these columns, batch by batch; padding of tokens does not
    count."""
    import pyarrow as pa

    from autopack.packing.documents import Documents

    before = 0
    for batch in data.batches([IDS, MASK] if names == [IDS] and MASK in data.names else names):
        with in_the_whole(range(before, 1 << 62)):
            if names == [IDS]:
                found = [Documents(pa.Table.from_batches([batch])).lengths]
            else:
                found = [_of_array(name, batch.column(name), tokenizer) for name in names]
        before += len(found[0])
        yield found


def _of_array(name: str, values: Any, tokenizer: Any) -> Any:
    """Return the lengths in an array of arrow.

    Anything but ints and lists of ints is read as Python has it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if values.null_count:
        raise InvalidPacking(
            f"column {name!r}: {values.null_count:,} examples have no value; leave them out", code="unusable-data"
        )
    if pa.types.is_integer(values.type):
        return values.to_numpy()
    of_tokens = getattr(values.type, "value_type", pa.null())
    if pa.types.is_integer(of_tokens) and not pc.list_flatten(values).null_count:
        return pc.list_value_length(values).to_numpy()
    return _of_values(values.to_pylist(), tokenizer)


def _of_values(values: Sequence[Any], tokenizer: Any) -> Any:
    """Return the tokens of each value: an int is their number, lists of ints are counted, text is
    tokenized.

    Messages of a chat are tokenized as text.
    """
    kinds = [_kind(value) for value in values]
    other = next((i for i, kind in enumerate(kinds) if kind is None or kind != kinds[0]), None)
    if other is not None:
        wanted = kinds[0] or f"{LENGTH}, {TOKENS}, {TEXT} or {MESSAGES}"
        raise InvalidPacking(f"example {other}: wanted {wanted}, found {values[other]!r:.60}", code="unusable-data")
    if kinds[0] == LENGTH:
        return values
    if kinds[0] == TOKENS:
        return [len(value) for value in values]
    if tokenizer is None:
        raise InvalidPacking(
            f"found {kinds[0]}, whose tokens are to be counted; name a tokenizer: tokenizer=NAME", code="tokenizer"
        )
    options: dict[str, Any] = {}
    if kinds[0] == MESSAGES:
        options["add_special_tokens"] = False  # the template has them
        try:
            values = [tokenizer.apply_chat_template(list(each), tokenize=False) for each in values]
        except Exception as error:  # templates are programs
            raise InvalidPacking(
                f"found {MESSAGES}, and the tokenizer has no template for them: {error}; use one that has",
                code="tokenizer",
            ) from error
    batches = (list(values[start : start + BATCH]) for start in range(0, len(values), BATCH))
    return [len(ids) for texts in batches for ids in tokenizer(texts, **options)["input_ids"]]


def _chosen(names: Sequence[str], named: Sequence[str], tokenizer: Any) -> list[str]:
    """Return the columns that hold lengths, tokens, text or messages."""
    unnamed = ("text", "messages") if tokenizer is not None else (IDS, "length", "lengths", "text")
    found = [name for name in named or unnamed if name in names]
    if not found or len(found) < len(named):
        wanted = [name for name in named if name not in names] or unnamed
        raise InvalidPacking(
            f"found no column {' or '.join(map(repr, wanted))} in {list(names)}; name the column", code="unusable-data"
        )
    return found if named else found[:1]


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
        raise InvalidPacking(f"wanted columns of as many examples each, found {sorted(sizes)}", code="unusable-data")
    for values in columns:
        read(np.where(np.equal(values, 0), 1, values))  # a prompt or a completion may be empty, not both
    return read(np.sum(columns, axis=0))

"""Lengths of documents: numbers as they are given, and the tokens of examples, which `datasets` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.checks import IDS, MASK, no_examples, unusable
from autopack.packing.lengths import read

BATCH = 1000
"""Examples of a data set that are read at a time, and texts that are tokenized at a time."""
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
            raise InvalidPacking(
                f"tokenizer {str(tokenizer)!r}: cannot be loaded: {error}", code="tokenizer"
            ) from error
    named = [column] if isinstance(column, str) else list(column or ())
    return _read(data, lambda opened: _lengths(opened, named, tokenizer))


def documents_of(data: Any) -> Any:
    """Return the documents of data that holds tokens (`autopack.packing.documents.Documents`).

    See `autopack.estimate`.
    """
    return _read(data, _documents)


def _read(data: Any, reader: Any) -> Any:
    """Return what a reader makes of data, opened if it is a path; its errors then name the path."""
    where = ""
    try:
        if isinstance(data, (str, PathLike)):
            where = f"{data or 'an empty path'}: "
            data = _open(data)
        return reader(_dataset(data))
    except ImportError as error:
        raise InvalidPacking(
            f'{where}needs {error.name}: pip install "autopack[data]"', code="missing-package"
        ) from error
    except InvalidPacking as error:
        raise InvalidPacking(f"{where}{error.message}", code=error.code) from error


def _open(given: str | PathLike[str]) -> Any:
    """Return what a file or folder holds."""
    path = Path(given)
    if not str(given) or not path.exists():
        raise InvalidPacking("no such file or folder; check the path", code="bad-file")
    if not path.is_dir() and path.suffix not in FILES:
        raise InvalidPacking(f"wanted one of {', '.join(FILES)}, or a folder of a dataset", code="bad-file")
    try:
        if path.is_dir():
            from datasets import load_from_disk

            return load_from_disk(str(path))
        if path.suffix == ".parquet":
            from datasets import Dataset

            return Dataset.from_parquet(str(path))
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()] if path.suffix == ".jsonl" else json.load(file)
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidPacking(f"cannot be read as {path.suffix or 'a dataset'}: {error}", code="bad-file") from error


def _dataset(data: Any) -> Any:
    """Return examples and columns as a `datasets.Dataset`, and anything else as it is."""
    if hasattr(data, "column_names"):
        if not isinstance(data.column_names, list) or not hasattr(data, "data"):
            one_split = isinstance(data.column_names, dict)
            way = "one split of it" if one_split else "a Dataset, such as a sample of the stream"
            raise no_examples(f"wanted a Dataset, found {type(data).__name__}; pass {way}")
        return data
    first = data[0] if isinstance(data, (list, tuple)) and data else data
    if not isinstance(first, Mapping):
        return data
    from datasets import Dataset

    try:
        return Dataset.from_dict(dict(data)) if first is data else Dataset.from_list(list(data))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:  # what arrow raises is among them
        raise unusable(f"these examples make no columns, each of one kind of values: {error}") from error


def _lengths(data: Any, named: list[str], tokenizer: Any) -> np.ndarray:
    """Return tokens of each document; if columns are `named`, those of all these together."""
    if not hasattr(data, "column_names"):
        return read(data)
    unnamed = ["text", "messages"] if tokenizer is not None else [IDS, "length", "lengths", "text"]
    known = [name for name in named or unnamed if name in data.column_names]
    if not known or len(known) < len(named):
        wanted = [name for name in named if name not in known] or unnamed
        raise unusable(f"found no column {' or '.join(map(repr, wanted))} in {data.column_names}; name the column")
    names = known if named else known[:1]
    if names == [IDS]:
        return _documents(data).lengths
    batches = data.select_columns(names).with_format("arrow").iter(BATCH)
    counted = [sum(_counted(name, batch.column(name), tokenizer) for name in names) for batch in batches]
    return read(np.concatenate(counted) if counted else [])


def _documents(data: Any) -> Any:
    """Return the documents of examples, of which `input_ids` and `attention_mask` are read."""
    names = getattr(data, "column_names", ())
    if IDS not in names:
        raise unusable(f"groups: wanted examples with a column {IDS!r}, whose tokens say what begins alike")
    from autopack.packing.documents import Documents

    return Documents.of_dataset(data, [name for name in names if name not in (IDS, MASK)])


def _counted(name: str, values: Any, tokenizer: Any) -> np.ndarray:
    """Return the tokens of each value of an arrow column.

    An int is their number. Lists of ints are counted; text is tokenized, and so are messages of a
    chat as their template writes them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, inner = values.type, getattr(values.type, "value_type", None)
    of_lists = isinstance(inner, pa.DataType)
    absent = values.null_count or (of_lists and pc.list_flatten(values).null_count)
    if absent:
        raise unusable(f"column {name!r}: values are missing ({absent:,}); fill them, or leave the examples out")
    if pa.types.is_integer(kind):
        return values.to_numpy()
    if of_lists and pa.types.is_integer(inner):
        return pc.list_value_length(values).to_numpy()
    is_chat = of_lists and _holds_messages(inner)
    if not (is_chat or _is_text(kind)):
        wanted = "lengths, lists of token ids, text, or messages with role and content"
        raise unusable(f"column {name!r}: wanted {wanted}, found {kind}")
    if tokenizer is None:
        raise InvalidPacking(
            f"column {name!r} holds text, whose tokens are to be counted; name a tokenizer: tokenizer=NAME",
            code="tokenizer",
        )
    texts, options = values.to_pylist(), {}
    if is_chat:
        options["add_special_tokens"] = False  # the template has them
        try:
            texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in texts]
        except Exception as error:  # templates are programs
            raise InvalidPacking(
                f"column {name!r} holds messages, and the tokenizer has no template for them: {error}; use one "
                f"that has",
                code="tokenizer",
            ) from error
    return np.array([len(ids) for ids in tokenizer(texts, **options)["input_ids"]])


def _holds_messages(kind: Any) -> bool:
    import pyarrow as pa

    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    return "role" in fields and "content" in fields and _is_text(fields["content"])


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)

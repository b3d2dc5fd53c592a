"""Parts of a plan as files: the folder of shards, and the rows of a shard."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from autopack.packing.checks import bad_file
from autopack.packing.dataset import features_of
from autopack.packing.documents import Documents
from autopack.packing.lengths import Counts, nothing_left
from autopack.packing.plans import Plan
from autopack.packing.rows import Packing, WrittenRows
from autopack.version import __version__

SHARD_TOKENS = 1 << 25
"""Approximate tokens of a shard, unless a number of shards is asked for."""
NAME = "rows-{:05d}-of-{:05d}.parquet"
NAMED = re.compile(r"rows-(\d{5,})-of-(\d{5,})\.parquet")
SET = b"autopack"
"""Metadata key of a shard with the mark of its set, the same in all shards of a set."""


@dataclass(frozen=True)
class Shards:
    """Shards that were written: `files`, in the order of their rows, and their totals.

    They have `rows` of at most `max_length` tokens, and `tokens`. `counts` are of the documents
    that were planned for all shards.
    """

    files: tuple[str, ...]
    rows: int
    tokens: int
    max_length: int
    counts: Counts

    @property
    def fill(self) -> float:
        """Share of all columns that hold tokens, if every row is padded to `max_length`."""
        return self.tokens / (self.rows * self.max_length)

    @property
    def padding(self) -> int:
        """Columns without a token, if every row is padded to `max_length`."""
        return self.rows * self.max_length - self.tokens

    def __repr__(self) -> str:
        return (
            f"Shards({self.rows:,} rows of {self.max_length:,} tokens in {len(self.files):,} "
            f"files, fill {self.fill:.4f}, padding {self.padding:,})"
        )


class Folder:
    """A folder of shards: a path, or an address that `pyarrow.fs` knows (`file://`, `s3://` and so
    on).

    A shard appears under its name when it is whole. Until then it lies beside that, under a hidden
    name of its own, so that a repeated task disturbs none that still runs.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ValueError(f"path={path!r}: wanted a folder")
        try:
            self.path = os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)
            self.system, base = fs.FileSystem.from_uri(self.path)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"path={path!r}: wanted a folder; {error}") from error
        self.base = base.rstrip("/")
        if pattern := re.search(r"[*?[]", self.base):
            raise ValueError(
                f"path={self.path!r}: found {pattern[0]!r}, which datasets reads as a pattern of "
                "names; rename the folder, or name another one"
            )

    def names(self) -> list[str]:
        """Return the names in the folder that are not hidden, sorted; none if there is no
        folder."""
        found = self.system.get_file_info(fs.FileSelector(self.base, allow_not_found=True))
        return sorted(info.base_name for info in found if not info.base_name.startswith("."))

    def address(self, name: str) -> str:
        """Return the path of a file for local programs or `pyarrow.fs`."""
        return f"{self.path.rstrip('/')}/{name}"

    def prepare(self, wanted: str | None = None, marked: bytes = b"") -> None:
        """Make the folder, for a whole set of shards or for the one that is `wanted`.

        Raises `ValueError` if it holds anything but other shards of the same set.
        """
        if self.system.get_file_info(self.base).type == fs.FileType.File:
            raise ValueError(f"path={self.path!r}: wanted a folder, found a file")
        found = self.names()
        if wanted in found:
            raise ValueError(
                f"path={self.path!r}: found {wanted!r}, which is whole; delete it to write it "
                "again",
            )
        for name in found:
            if wanted is None or NAMED.fullmatch(name) is None:
                raise ValueError(
                    f"path={self.path!r}: found {name!r} in it; wanted a new folder, or an empty "
                    "one",
                )
        if found and self.mark(found[0]) != marked:
            raise ValueError(
                f"path={self.path!r}: found {found[0]!r}, of another plan or other options; wanted "
                "a new folder, or the same arguments"
            )
        self.system.create_dir(self.base, recursive=True)

    def mark(self, name: str) -> bytes | None:
        """Return the mark of the set in a shard's metadata."""
        try:
            with self.system.open_input_file(f"{self.base}/{name}") as file:
                return (pq.read_schema(file).metadata or {}).get(SET)
        except pa.ArrowException as error:
            raise bad_file(f"{self.address(name)}: wanted a parquet file, found {error}") from error

    def write(
        self,
        tables: Iterable[pa.Table],
        marked: bytes,
        name: str,
        metadata: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """Write these tables of rows, each a group of rows, under this name when all are written.

        Nothing is left behind if it fails.
        """
        hidden = f".{name}.{uuid.uuid4().hex}"
        made = iter(tables)
        first = next(made)  # plans without rows have been refused
        schema = first.schema.with_metadata({**(metadata or {}), SET: marked})
        try:
            with (
                self.system.open_output_stream(f"{self.base}/{hidden}") as sink,
                pq.ParquetWriter(sink, schema) as to,
            ):
                for table in chain([first], made):
                    to.write_table(table)
            self.publish(hidden, name)
        except BaseException:
            with suppress(OSError):
                self.system.delete_file(f"{self.base}/{hidden}")
            raise

    def publish(self, hidden: str, name: str) -> None:
        """Give a hidden file its name."""
        self.system.move(f"{self.base}/{hidden}", f"{self.base}/{name}")

    def shards(self, names: list[str], plan: Plan) -> Shards:
        """Return the shards in these files, with the rows of a plan."""
        tokens = int(plan.lengths.sum())
        files = tuple(map(self.address, names))
        return Shards(files, len(plan), tokens, plan.max_length, plan.counts)


def mark_of(packing: Packing, count: int, plan: Plan) -> bytes:
    """Return a digest of everything that determines the contents of a set of so many shards."""
    found = hashlib.sha256(repr((__version__, count, packing.options)).encode())
    for array in (plan.documents, plan.offsets, plan.lengths, plan.bounds):
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest().encode()


def edges_of(plan: Plan, count: int | None) -> np.ndarray:
    """Return the bounds of `count` shards of rows, as even as possible: (count + 1,) int64.

    By default there is one for about `SHARD_TOKENS` tokens. Raises if there are too few rows.
    """
    if not len(plan):
        raise nothing_left(plan.counts)
    if count is not None and count > len(plan):
        raise ValueError(
            f"num_shards={count}: wanted at most as many as there are rows, {len(plan):,}"
        )
    count = count or max(1, min(len(plan), round(int(plan.lengths.sum()) / SHARD_TOKENS)))
    return np.arange(count + 1, dtype=np.int64) * len(plan) // count


def pack_own(
    dataset: Any,
    packing: Packing,
    folder: Folder,
    num_shards: int | None,
    shard: int | None,
) -> Shards:
    """Write shards of a `datasets.Dataset`, one after the other; see
    `autopack.packing.pack_shards`."""
    documents = Documents.of_dataset(dataset, packing.drop_columns)
    whole = packing.plan(documents.lengths)
    edges = edges_of(whole, num_shards)
    count = len(edges) - 1
    marked = mark_of(packing, count, whole)
    numbers = range(count) if shard is None else [shard]
    names = [NAME.format(number, count) for number in numbers]
    folder.prepare(None if shard is None else names[0], marked)
    metadata = features_of(dataset, WrittenRows(documents, whole, packing)).arrow_schema.metadata
    for name, number in zip(names, numbers, strict=True):
        part = whole[edges[number] : edges[number + 1]]
        folder.write(WrittenRows(documents, part, packing).tables(), marked, name, metadata)
    return folder.shards(names, whole if shard is None else part)

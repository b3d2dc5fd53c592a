"""Parts of a plan as files: the folder of shards, and the rows of a shard."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from autopack.errors import InvalidPacking
from autopack.packing.checks import LENGTHS, in_the_whole, other_data
from autopack.packing.dataset import features_of
from autopack.packing.documents import Documents, Taker, carried, rows_of
from autopack.packing.lengths import Counts
from autopack.packing.plans import ARRAYS, Plan
from autopack.packing.rows import Marks, Packing, WrittenRows, nothing_left, spans
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
        rows = f"{self.rows:,} rows of {self.max_length:,} tokens in {len(self.files):,} files"
        return f"Shards({rows}, fill {self.fill:.4f}, padding {self.padding:,})"


class Written(NamedTuple):
    """A file of rows that was written: its name in the folder, its rows and tokens."""

    name: str
    rows: int
    tokens: int


class Folder:
    """A folder of shards: a path, or an address that `pyarrow.fs` knows (`file://`, `s3://` and so
    on).

    A shard appears under its name when it is whole. Until then it lies beside that, under a hidden
    name of its own, so that a repeated task disturbs none that still runs.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ValueError(f"path={path!r}: wanted a folder")
        self.path = os.fspath(path)
        try:
            if "://" in self.path:
                self.system, self.base = fs.FileSystem.from_uri(self.path)
            else:
                self.system, self.base = fs.LocalFileSystem(), os.path.abspath(self.path)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"path={self.path!r}: wanted a folder; {error}") from error
        self.base = self.base.rstrip("/")
        if pattern := next((character for character in self.base if character in "*?["), None):
            found = f"found {pattern!r}, which datasets reads as a pattern of names"
            raise ValueError(f"path={self.path!r}: {found}; rename the folder, or name another one")

    def names(self) -> list[str]:
        """Return the names in the folder that are not hidden, sorted; none if there is no
        folder."""
        found = self.system.get_file_info(fs.FileSelector(self.base, allow_not_found=True))
        return sorted(info.base_name for info in found if not info.base_name.startswith("."))

    def address(self, name: str) -> str:
        """Return the path of a file for local programs or `pyarrow.fs`."""
        return f"{self.path.rstrip('/')}/{name}" if "://" in self.path else f"{self.base}/{name}"

    def prepare(self, wanted: str | None = None, count: int = 0, marked: str = "") -> None:
        """Make the folder, for a whole set of shards or for the one that is `wanted`.

        Raises `ValueError` if it holds anything but other shards of the same set of `count`.
        """
        if self.system.get_file_info(self.base).type == fs.FileType.File:
            raise ValueError(f"path={self.path!r}: wanted a folder, found a file")
        found = self.names()
        if wanted in found:
            raise ValueError(f"path={self.path!r}: found {wanted!r}, which is whole; delete it to write it again")
        for name in found:
            named = NAMED.fullmatch(name)
            if wanted is None or named is None or int(named[2]) != count:
                raise ValueError(f"path={self.path!r}: found {name!r} in it; wanted a new folder, or an empty one")
        if found and self.mark(found[0]) != marked:
            found_other = f"found {found[0]!r}, of another plan or other options"
            raise ValueError(f"path={self.path!r}: {found_other}; wanted a new folder, or the same arguments")
        self.system.create_dir(self.base, recursive=True)

    def mark(self, name: str) -> str | None:
        """Return the mark of the set in a shard's metadata."""
        try:
            with self.system.open_input_file(f"{self.base}/{name}") as file:
                found = (pq.read_schema(file).metadata or {}).get(SET)
        except pa.ArrowException as error:
            raise InvalidPacking(
                f"{self.address(name)}: wanted a parquet file, found {error}", code="bad-file"
            ) from error
        return None if found is None else found.decode()

    @contextmanager
    def undone(self, marked: str) -> Iterator[None]:
        """Delete the shards of a whole set that is written inside if that fails, so that it can be
        repeated."""
        try:
            yield
        except BaseException:
            for name in self.names():
                if NAMED.fullmatch(name) and self.mark(name) == marked:
                    self.forget(name)
            raise

    def write(self, tables: Iterable[pa.Table], marked: str, name: str) -> Written:
        """Write these tables of rows, each a group of rows, under this name when all are written.

        Nothing is left behind if it fails.
        """
        hidden = f".{name}.{uuid.uuid4().hex}"
        made = iter(tables)
        first = next(made)  # plans without rows have been refused
        schema = first.schema.with_metadata({**(first.schema.metadata or {}), SET: marked.encode()})
        rows = tokens = 0
        try:
            with self.system.open_output_stream(f"{self.base}/{hidden}") as sink, pq.ParquetWriter(sink, schema) as to:
                for table in chain([first], made):
                    to.write_table(table)
                    rows += table.num_rows
                    tokens += sum(int(chunk.flatten().to_numpy().sum()) for chunk in table.column(LENGTHS).chunks)
            self.publish(hidden, name)
        except BaseException:
            self.forget(hidden)
            raise
        return Written(name, rows, tokens)

    def publish(self, hidden: str, name: str) -> None:
        """Give a hidden file its name."""
        self.system.move(f"{self.base}/{hidden}", f"{self.base}/{name}")

    def forget(self, hidden: str) -> None:
        """Delete a hidden file, if it is there."""
        with suppress(OSError):
            self.system.delete_file(f"{self.base}/{hidden}")

    def shards(self, written: list[Written], max_length: int, counts: Counts) -> Shards:
        """Return what was written, its files in this order."""
        files = tuple(self.address(part.name) for part in written)
        return Shards(
            files, sum(part.rows for part in written), sum(part.tokens for part in written), max_length, counts
        )


def mark_of(packing: Packing, count: int | None, plan: Plan | None) -> str:
    """Return a digest of all that the shards of a set have in common.

    It covers the plan, and everything else that determines the contents of rows.
    """
    planned = packing.planned if plan is None else None
    options = packing.max_length, sorted(packing.drop_columns), packing.marks
    found = hashlib.sha256(repr((__version__, count, *options, planned)).encode())
    for name in ARRAYS if plan is not None else ():
        found.update(np.ascontiguousarray(getattr(plan, name)).data)
    return found.hexdigest()


def edges_of(plan: Plan, count: int | None) -> np.ndarray:
    """Return the bounds of `count` shards of rows, as even as possible: (count + 1,) int64.

    Raises if the plan cannot have so many.
    """
    if not len(plan):
        raise nothing_left(plan.counts)
    if count is not None and count > len(plan):
        raise ValueError(f"num_shards={count}: wanted at most as many as there are rows, {len(plan):,}")
    count = count or min(len(plan), count_by_tokens(plan.lengths))
    return np.arange(count + 1, dtype=np.int64) * len(plan) // count


class Work(NamedTuple):
    """Rows of a shard: `plan`, of documents that have `planned` tokens in the plan of all, and these
    `numbers` in the data."""

    plan: Plan
    planned: np.ndarray
    numbers: np.ndarray

    @classmethod
    def of_rows(cls, plan: Plan, planned: np.ndarray, first: int, end: int) -> Work:
        """Return these rows of a plan of all documents, which have `planned` tokens in it."""
        part = plan[first:end]
        numbers = np.unique(part.documents)
        return cls(replace(part, documents=np.searchsorted(numbers, part.documents)), planned[numbers], numbers)

    @classmethod
    def of_part(cls, packing: Packing, lengths: np.ndarray, first: int) -> Work:
        """Return all rows of documents of these lengths, the `first` and those that follow it,
        planned by themselves."""
        numbers = np.arange(first, first + len(lengths))
        with in_the_whole(numbers):
            plan = packing.plan(lengths)
        return cls(plan, tokens_of(plan, len(lengths)), numbers)

    def tables(self, take: Taker, marks: Marks, dataset: Any = None) -> Iterator[pa.Table]:
        """Yield the rows, a million tokens at a time, from documents that are taken for them.

        `take` has them in the order of their numbers. Columns are like those of the `dataset`, if
        any.
        """
        features = None
        if not len(self.plan):
            raise nothing_left(self.plan.counts)
        for first, end in spans(len(self.plan), self.plan.max_length):
            part = Work.of_rows(self.plan, self.planned, first, end)
            with in_the_whole(self.numbers[part.numbers]):
                documents = Documents(take(part.numbers))
                check_lengths(self.plan, documents.lengths, part.planned)
                rows = WrittenRows(documents, part.plan, marks)
                table = rows.table()
                if dataset is not None:
                    from datasets.table import table_cast

                    features = features or features_of(dataset, rows)
                    table = table_cast(table, features.arrow_schema)
            yield table


def count_by_tokens(lengths: np.ndarray) -> int:
    """Return the default number of shards."""
    return max(1, min(len(lengths), round(int(lengths.sum()) / SHARD_TOKENS)))


def total(counts: list[Counts]) -> Counts:
    """Return the counts of several plans together."""
    return Counts(*(sum(getattr(found, field.name) for found in counts) for field in fields(Counts)))


def tokens_of(plan: Plan, documents: int) -> np.ndarray:
    """Return tokens of each of so many documents in the plan, (documents,) int64: 0 for those that
    it leaves out.

    Raises `InvalidPacking` if the plan is of another number of documents.
    """
    if plan.counts.documents != documents:
        found = f"the plan is of {plan.counts.documents:,} documents, and the dataset has {documents:,}"
        raise other_data(f"{found}; make the plan of the same data again")
    tokens = np.zeros(documents, np.int64)
    np.maximum.at(tokens, plan.documents, plan.offsets + plan.lengths)
    return tokens


def check_lengths(plan: Plan, found: np.ndarray, planned: np.ndarray) -> None:
    """Raise `InvalidPacking` unless documents of the lengths `found` have `planned` tokens in the
    plan."""
    same = found == planned
    if plan.counts.truncated:
        same |= (planned == plan.max_length) & (found > plan.max_length)
    if plan.counts.dropped:
        same |= (planned == 0) & (found > plan.max_length)
    if not same.all():
        index = int(same.argmin())
        reason = f"has {found[index]} tokens, of which the plan has {planned[index]}"
        raise other_data(f"example {index} {reason}; make the plan of the same data again")


def pack_own(
    dataset: Any, packing: Packing, folder: Folder, plan: Any, num_shards: int | None, shard: int | None
) -> Shards:
    """Write shards of a `datasets.Dataset`, one after the other; see
    `autopack.packing.pack_shards`."""

    def lengths_of(part: Any) -> np.ndarray:
        return Documents.of_dataset(part, packing.drop_columns).lengths

    if not len(dataset):
        raise nothing_left(Counts(0, 0))
    plan = packing.plan(lengths_of(dataset)) if plan == "all" else plan
    whole = plan if isinstance(plan, Plan) else None
    if whole is not None:
        planned, edges = tokens_of(whole, len(dataset)), edges_of(whole, num_shards)
        count = len(edges) - 1
    else:
        count = num_shards or count_by_tokens(lengths_of(dataset))
        if count > len(dataset):
            raise ValueError(f"num_shards={count}: wanted at most as many as there are examples, {len(dataset):,}")
    marked = mark_of(packing, count, whole)
    folder.prepare(None if shard is None else NAME.format(shard, count), count, marked)
    table = dataset.data.table.select(carried(dataset.column_names, packing.drop_columns))
    rows, written, counts = rows_of(dataset), [], []
    with folder.undone(marked) if shard is None else nullcontext():
        for number in range(count) if shard is None else [shard]:
            if whole is not None:
                work = Work.of_rows(whole, planned, *edges[number : number + 2])
            else:
                part = dataset.shard(num_shards=count, index=number, contiguous=True)
                first = number * (len(dataset) // count) + min(number, len(dataset) % count)
                with in_the_whole(range(first, first + len(part))):
                    lengths = lengths_of(part)
                work = Work.of_part(packing, lengths, first)
                counts.append(work.plan.counts)
            take = Taker(table, work.numbers if rows is None else rows[work.numbers])
            made = work.tables(take, packing.marks, dataset)
            written.append(folder.write(made, marked, NAME.format(number, count)))
    return folder.shards(written, packing.max_length, whole.counts if whole is not None else total(counts))

"""Parts of a plan as files: the folder of shards, and the rows of a shard."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from autopack.packing.checks import bad_file, in_the_whole, other_data
from autopack.packing.dataset import features_of
from autopack.packing.documents import Documents
from autopack.packing.lengths import Counts, nothing_left
from autopack.packing.plans import ARRAYS, Plan
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
            f"Shards({self.rows:,} rows of {self.max_length:,} tokens in {len(self.files):,} files, "
            f"fill {self.fill:.4f}, padding {self.padding:,})"
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
                f"path={self.path!r}: found {wanted!r}, which is whole; delete it to write it again",
            )
        for name in found:
            if wanted is None or NAMED.fullmatch(name) is None:
                raise ValueError(
                    f"path={self.path!r}: found {name!r} in it; wanted a new folder, or an empty one",
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

    @contextmanager
    def undone(self, marked: bytes) -> Iterator[None]:
        """Delete the shards of a whole set that is written inside if that fails, so that it can be
        repeated."""
        try:
            yield
        except BaseException:
            for name in self.names():
                if NAMED.fullmatch(name) and self.mark(name) == marked:
                    self.forget(name)
            raise

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
            with self.system.open_output_stream(f"{self.base}/{hidden}") as sink, pq.ParquetWriter(sink, schema) as to:
                for table in chain([first], made):
                    to.write_table(table)
            self.publish(hidden, name)
        except BaseException:
            self.forget(hidden)
            raise

    def publish(self, hidden: str, name: str) -> None:
        """Give a hidden file its name."""
        self.system.move(f"{self.base}/{hidden}", f"{self.base}/{name}")

    def forget(self, hidden: str) -> None:
        """Delete a hidden file, if it is there."""
        with suppress(OSError):
            self.system.delete_file(f"{self.base}/{hidden}")

    def shards(self, names: list[str], plans: list[Plan]) -> Shards:
        """Return the shards in these files, with the rows of these plans."""
        rows, tokens = sum(map(len, plans)), sum(int(plan.lengths.sum()) for plan in plans)
        counts = Counts(*map(sum, zip(*(astuple(plan.counts) for plan in plans), strict=True)))
        return Shards(tuple(map(self.address, names)), rows, tokens, plans[0].max_length, counts)


def mark_of(packing: Packing, count: int | None, plan: Plan | None) -> bytes:
    """Return a digest of everything that the shards of a set share.

    It covers the plan, and everything else that determines the contents of rows.
    """
    planned = packing.planned if plan is None else None
    found = hashlib.sha256(repr((__version__, count, packing.options, planned)).encode())
    for name in ARRAYS if plan is not None else ():
        found.update(np.ascontiguousarray(getattr(plan, name)).data)
    return found.hexdigest().encode()


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
    """Rows of a shard: `plan`, of documents with these `numbers` in the data, which have these
    `lengths` there."""

    plan: Plan
    numbers: np.ndarray
    lengths: np.ndarray


def count_by_tokens(lengths: np.ndarray) -> int:
    """Return the default number of shards."""
    return max(1, min(len(lengths), round(int(lengths.sum()) / SHARD_TOKENS)))


def plan_of(lengths: np.ndarray, packing: Packing, plan: Plan | Literal["all"]) -> Plan:
    """Return the plan of documents of these lengths; raise `InvalidPacking` for one of others."""
    if isinstance(plan, str):
        return packing.plan(lengths)
    if plan.counts.documents != len(lengths):
        raise other_data(
            f"the plan is of {plan.counts.documents:,} documents, and the dataset has "
            f"{len(lengths):,}; make the plan of the same data again"
        )
    planned = np.zeros_like(lengths)
    np.maximum.at(planned, plan.documents, plan.offsets + plan.lengths)
    wanted = lengths
    if plan.counts.truncated or plan.counts.dropped:
        wanted = np.where(lengths > plan.max_length, plan.max_length if plan.counts.truncated else 0, lengths)
    refuse_other(planned != wanted, lengths, planned)
    return plan


def refuse_other(wrong: np.ndarray, lengths: np.ndarray, planned: np.ndarray) -> None:
    """Raise `InvalidPacking` for the first document whose length is not the one planned."""
    if wrong.any():
        index = int(wrong.argmax())
        raise other_data(
            f"example {index} has {lengths[index]} tokens, of which the plan has "
            f"{planned[index]}; make the plan of the same data again"
        )


def pack_own(
    dataset: Any, packing: Packing, folder: Folder, plan: Any, num_shards: int | None, shard: int | None
) -> Shards:
    """Write shards of a `datasets.Dataset`, one after the other; see
    `autopack.packing.pack_shards`."""
    if plan == "shard":
        whole, count = None, num_shards
        if count is None:
            count = count_by_tokens(Documents.of_dataset(dataset, packing.drop_columns).lengths)
        if count > len(dataset):
            raise ValueError(
                f"num_shards={count}: wanted at most as many as there are examples, {len(dataset):,}",
            )
        size, larger = divmod(len(dataset), count)
        shards = np.arange(count + 1)
        edges = shards * size + np.minimum(shards, larger)  # as dataset.shard has them
    else:
        documents = Documents.of_dataset(dataset, packing.drop_columns)
        whole = plan_of(documents.lengths, packing, plan)
        edges = edges_of(whole, num_shards)
        count = len(edges) - 1
    marked = mark_of(packing, count, whole)
    numbers = range(count) if shard is None else [shard]
    names = [NAME.format(number, count) for number in numbers]
    folder.prepare(None if shard is None else names[0], marked)
    planned: list[Plan] = []
    with folder.undone(marked) if shard is None else nullcontext():
        for name, number in zip(names, numbers, strict=True):
            first, end = edges[number : number + 2]
            with in_the_whole(range(first if whole is None else 0, len(dataset))):
                if whole is None:
                    documents = Documents.of_dataset(dataset.select(range(first, end)), packing.drop_columns)
                    planned.append(packing.plan(documents.lengths))
                else:
                    planned = [whole[first:end]]
                rows = WrittenRows(documents, planned[-1], packing)
                folder.write(rows.tables(), marked, name, features_of(dataset, rows).arrow_schema.metadata)
    return folder.shards(names, planned if whole is None or shard is not None else [whole])

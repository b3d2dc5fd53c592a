"""Parts of a plan as files: the rows of a shard, the folder of shards, and shards written here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from autopack.errors import InvalidPacking
from autopack.packing.checks import LENGTHS, is_int
from autopack.packing.dataset import features_of
from autopack.packing.documents import Documents, Taker, carried
from autopack.packing.lengths import LONGEST, Counts, bounds_of
from autopack.packing.plans import ARRAYS, Plan
from autopack.packing.rows import Packing, Rows, nothing_left
from autopack.version import __version__

BLOCK = 1 << 20
"""Tokens that are gathered and written at a time."""
SHARD_TOKENS = 1 << 25
"""Approximate tokens of a shard, unless a number of shards is asked for."""
NAME = "rows-{:05d}-of-{:05d}.parquet"
NAMED = re.compile(r"rows-(\d{5,})-of-(\d{5,})\.parquet")
SET = b"autopack"
"""Metadata key of a shard with the mark of its set, the same in all shards of a set."""
OWN = b"autopack_shard"
"""Metadata key with the name of the shard, or a unique one if its number is not known yet."""


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

    def prepare(self, wanted: str | None, count: int, marked: str) -> None:
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
        if found and self.marks(found[0])[0] != marked:
            found_other = f"found {found[0]!r}, of another plan or other options"
            raise ValueError(f"path={self.path!r}: {found_other}; wanted a new folder, or the same arguments")
        self.system.create_dir(self.base, recursive=True)

    def marks(self, name: str) -> tuple[str | None, str | None]:
        """Return the set in a shard's metadata, and its own name there; None for what is
        missing."""
        try:
            with self.system.open_input_file(f"{self.base}/{name}") as file:
                found = pq.read_schema(file).metadata or {}
        except pa.ArrowException as error:
            raise InvalidPacking(f"{self.address(name)}: wanted a parquet file, found {error}") from error
        told, own = (found[key].decode() if key in found else None for key in (SET, OWN))
        return told, own

    @contextmanager
    def undone(self, marked: str) -> Iterator[None]:
        """Delete the shards of a whole set that is written inside if that fails, so that it can be
        repeated."""
        try:
            yield
        except BaseException:
            for name in self.names():
                if NAMED.fullmatch(name) and self.marks(name)[0] == marked:
                    self.forget(name)
            raise

    def write(self, tables: Iterable[pa.Table], marked: str, name: str | None = None) -> tuple[str, int, int]:
        """Write these tables of rows, each a group of rows: under `name`, or for `publish`, a
        hidden name.

        Returns the name, rows and tokens. Nothing is left behind if it fails.
        """
        hidden = f".{name or 'rows'}.{uuid.uuid4().hex}"
        made = iter(tables)
        first = next(made)  # plans without rows have been refused
        told = {SET: marked.encode(), OWN: (name or hidden).encode()}
        schema = first.schema.with_metadata({**(first.schema.metadata or {}), **told})
        rows = tokens = 0
        try:
            with self.system.open_output_stream(f"{self.base}/{hidden}") as sink, pq.ParquetWriter(sink, schema) as to:
                for table in chain([first], made):
                    to.write_table(table)
                    rows += table.num_rows
                    tokens += sum(int(chunk.flatten().to_numpy().sum()) for chunk in table.column(LENGTHS).chunks)
            if name is not None:
                self.publish(hidden, name)
        except BaseException:
            self.forget(hidden)
            raise
        return name or hidden, rows, tokens

    def publish(self, hidden: str, name: str) -> None:
        """Give a hidden file its name."""
        self.system.move(f"{self.base}/{hidden}", f"{self.base}/{name}")

    def forget(self, hidden: str) -> None:
        """Delete a hidden file, if it is there."""
        with suppress(OSError):
            self.system.delete_file(f"{self.base}/{hidden}")


def mark_of(packing: Packing, count: int | None, plan: Plan | None) -> str:
    """Return a digest of all that the shards of a set have in common.

    It covers the plan, and everything else that determines the contents of rows.
    """
    told = {
        "version": __version__,
        "rows": int(packing.max_length),
        "shards": count,
        **packing.carried,
        **packing.added,
    }
    if plan is None:
        told |= packing.planned

    def written(value: Any) -> Any:
        return int(value) if is_int(value) else repr(value)

    found = hashlib.sha256(json.dumps(told, default=written, sort_keys=True).encode())
    for name in ARRAYS if plan is not None else ():
        found.update(np.ascontiguousarray(getattr(plan, name)).data)
    return found.hexdigest()


def count_shards(count: int | None, plan: Plan) -> int:
    """Return the number of shards to make of a plan; raise if it cannot have so many."""
    if not len(plan):
        raise nothing_left(plan.counts)
    if count is None:
        return min(len(plan), count_by_tokens(plan.lengths))
    if count > len(plan):
        raise ValueError(f"num_shards={count}: wanted at most as many as there are rows, {len(plan):,}")
    return int(count)


def count_by_tokens(lengths: np.ndarray) -> int:
    """Return the default number of shards."""
    return max(1, min(len(lengths), round(int(lengths.sum()) / SHARD_TOKENS)))


def total(counts: list[Counts]) -> Counts:
    """Return the counts of several plans together."""
    return Counts(*(sum(getattr(found, field.name) for found in counts) for field in fields(Counts)))


def edges_of(count: int, shards: int) -> np.ndarray:
    """Return the bounds of so many shards of rows, as even as possible: (shards + 1,) int64."""
    return np.arange(shards + 1, dtype=np.int64) * count // shards


def check_sizes(plan: Plan, edges: np.ndarray) -> None:
    """Raise `ValueError` if a shard's documents, which one task holds, are too many for lists of
    arrow."""
    tokens = int(np.diff(bounds_of(plan.lengths)[plan.bounds[edges]]).max())
    if tokens >= LONGEST:
        least = -(-int(plan.lengths.sum()) // (LONGEST // 2))
        raise ValueError(f"num_shards={len(edges) - 1}: found {tokens:,} tokens in a shard; ask for {least} or more")


def spans(rows: int, max_length: int) -> list[tuple[int, int]]:
    """Return the first and end of runs of rows of about a million tokens each."""
    width = max(1, BLOCK // max_length)
    return [(first, min(first + width, rows)) for first in range(0, rows, width)]


def tables(rows: Rows) -> Iterator[pa.Table]:
    """Yield the rows of a plan, about a million tokens at a time."""
    return (rows.table(*span) for span in spans(len(rows.plan), rows.plan.max_length))


def check_count(plan: Plan, documents: int) -> None:
    """Raise `InvalidPacking` unless a plan is of so many documents."""
    if plan.counts.documents != documents:
        found = f"the plan is of {plan.counts.documents:,} documents, and the dataset has {documents:,}"
        raise InvalidPacking(f"{found}; make the plan of the same data again")


def planned_lengths(plan: Plan) -> np.ndarray:
    """Return tokens of each document in the plan, (documents,) int64: 0 for those that it leaves
    out."""
    found = np.zeros(plan.counts.documents, np.int64)
    np.maximum.at(found, plan.documents, plan.offsets + plan.lengths)
    return found


def check_lengths(plan: Plan, found: np.ndarray, planned: np.ndarray, numbers: np.ndarray | None = None) -> None:
    """Raise `InvalidPacking` unless a plan is of documents of these lengths.

    `found` and `planned`, as of `planned_lengths`, are of documents `numbers`, or of all.
    """
    same = found == planned
    if plan.counts.truncated:
        same |= (planned == plan.max_length) & (found > plan.max_length)
    if plan.counts.dropped:
        same |= (planned == 0) & (found > plan.max_length)
    if not same.all():
        index = int(same.argmin())
        number = index if numbers is None else int(numbers[index])
        reason = f"example {number} has {found[index]} tokens, of which the plan has {planned[index]}"
        raise InvalidPacking(f"wanted a plan of these documents: {reason}; make the plan of the same data again")


@contextmanager
def in_the_whole(numbers: np.ndarray) -> Iterator[None]:
    """Name an example of a part by its number in the whole, in errors about it."""
    try:
        yield
    except InvalidPacking as error:
        raise InvalidPacking(renumbered(str(error), numbers)) from error


def renumbered(message: str, numbers: Any) -> str:
    """Return an error's message about an example of a part, with its number in the whole."""
    return re.sub(r"^example (\[?)(\d+)", lambda found: f"example {found[1]}{numbers[int(found[2])]}", message)


def pack_own(
    dataset: Any, packing: Packing, folder: Folder, plan: Any, num_shards: int | None, shard: int | None
) -> Shards:
    """Write shards of a `datasets.Dataset`, one after the other; see
    `autopack.packing.pack_shards`."""
    if not len(dataset):
        raise InvalidPacking("wanted at least one example, found an empty dataset")
    if plan == "all":
        plan = packing.plan(Documents.of_dataset(dataset, **packing.carried).lengths)
    if isinstance(plan, Plan):
        check_count(plan, len(dataset))
        count = count_shards(num_shards, plan)
        marked, edges = mark_of(packing, count, plan), edges_of(len(plan), count).tolist()
    else:
        count = num_shards or count_by_tokens(Documents.of_dataset(dataset, **packing.carried).lengths)
        if count > len(dataset):
            raise ValueError(f"num_shards={count}: wanted at most as many as there are examples, {len(dataset):,}")
        marked = mark_of(packing, count, None)
    folder.prepare(None if shard is None else NAME.format(shard, count), count, marked)
    written, counts = [], []
    with folder.undone(marked) if shard is None else nullcontext():
        for number in range(count) if shard is None else [shard]:
            if isinstance(plan, Plan):
                part, whole, chosen = dataset, plan, plan[edges[number] : edges[number + 1]]
            else:
                part = dataset.shard(num_shards=count, index=number, contiguous=True)
                chosen = whole = packing.plan(Documents.of_dataset(part, **packing.carried).lengths)
                counts.append(whole.counts)
            made = _gathered(part, whole, chosen, packing)
            written.append(folder.write(made, marked, NAME.format(number, count)))
    names, rows, tokens = zip(*written, strict=True)
    files = tuple(folder.address(name) for name in names)
    found = plan.counts if isinstance(plan, Plan) else total(counts)
    return Shards(files, sum(rows), sum(tokens), packing.max_length, found)


def _gathered(dataset: Any, whole: Plan, chosen: Plan, packing: Packing) -> Iterator[Any]:
    """Yield tables of the rows `chosen` of a plan of the `whole` dataset, a million tokens at a
    time.

    Only the documents that they need are read.
    """
    from datasets.table import table_cast

    if not len(chosen):
        raise nothing_left(whole.counts)
    take = Taker(dataset, carried(dataset.column_names, **packing.carried))
    planned, features = planned_lengths(whole), None
    for first, end in spans(len(chosen), chosen.max_length):
        part = chosen[first:end]
        numbers = np.unique(part.documents)
        with in_the_whole(numbers):
            documents = Documents(take(numbers), None, None, ())
            check_lengths(whole, documents.lengths, planned[numbers], numbers)
            here = replace(part, documents=np.searchsorted(numbers, part.documents))  # as the table numbers them
            rows = Rows(documents, here, **packing.added)
            features = features or features_of(dataset, rows)
            table = table_cast(rows.table(), features.arrow_schema)
        yield table

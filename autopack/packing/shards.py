"""Packed rows beyond one machine: `pack_shards` writes the rows of a plan as parquet files.

The engines are third-party: datasets, of which every job of an array writes a shard, and Ray Data
(`on_ray`), which schedules the whole. This module has the plan, the folder, and rows made of them
as `autopack.pack` does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from autopack.integrations.trainers import derives_from
from autopack.packing.checks import (
    Counts,
    Overflow,
    bad_file,
    check_options,
    no_examples,
    nothing_left,
)
from autopack.packing.dataset import Packing, PlannedRows, features_of
from autopack.packing.documents import Documents
from autopack.packing.plans import Plan, Strategy
from autopack.version import __version__

logger = logging.getLogger(__name__)
SHARD_TOKENS = 1 << 25
"""Approximate tokens of a shard, unless a number of shards is asked for."""
NAME = "rows-{:05d}-of-{:05d}.parquet"
NAMED = re.compile(r"rows-(\d{5,})-of-(\d{5,})\.parquet")
SET = b"autopack"
"""Metadata key of a shard with the digest of its set, the same in all shards of a set."""
Metadata = dict[bytes, bytes]


@dataclass(frozen=True)
class Shards:
    """Shards that were written: `files`, in the order of their rows, and their totals.

    They have `rows` of at most `max_length` tokens, and `tokens`. `counts` are of the documents
    that were planned for all shards. `fill` is the share of all columns that hold tokens, and
    `padding` the number of columns without one, if every row is padded to `max_length`.
    """

    files: tuple[str, ...]
    rows: int
    tokens: int
    max_length: int
    counts: Counts
    fill: float
    padding: int

    def __repr__(self) -> str:
        return (
            f"Shards({self.rows:,} rows of {self.max_length:,} tokens in {len(self.files):,} "
            f"files, fill {self.fill:.4f}, padding {self.padding:,})"
        )


class Folder:
    """Folder of shards: a path, or an address of `pyarrow.fs` (`file://`, `s3://` and so on).

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

    def names(self) -> list[str]:
        """Return the sorted names in the folder, without hidden ones; [] if there is no folder."""
        found = self.system.get_file_info(fs.FileSelector(self.base, allow_not_found=True))
        return sorted(info.base_name for info in found if not info.base_name.startswith("."))

    def address(self, name: str) -> str:
        """Return a file's path or address, for local programs or `pyarrow.fs`."""
        return f"{self.path.rstrip('/')}/{name}"

    def prepare(self, wanted: str | None, digest: Metadata) -> None:
        """Create the folder for all shards of a set, or for the one shard that is named `wanted`.

        Raises `ValueError` if it holds anything but other shards of the same set.
        """
        if self.system.get_file_info(self.base).type == fs.FileType.File:
            raise ValueError(f"path={self.path!r}: wanted a folder, found a file")
        found = self.names()
        unfit = [name for name in found if wanted in (None, name) or not NAMED.fullmatch(name)]
        if unfit or (found and self.digest(found[0]) != digest):
            raise ValueError(
                f"path={self.path!r}: found {(unfit or found)[0]!r} in it; wanted a new folder, an "
                "empty one, or, for one shard, only others of the same plan and options"
            )
        self.system.create_dir(self.base, recursive=True)

    def digest(self, name: str) -> Metadata:
        """Return the digest of a shard's set, as metadata, read from the shard."""
        try:
            with self.system.open_input_file(f"{self.base}/{name}") as file:
                return {SET: (pq.read_schema(file).metadata or {}).get(SET, b"")}
        except pa.ArrowException as error:
            raise bad_file(f"{self.address(name)}: wanted a parquet file, found {error}") from error

    def write(self, rows: PlannedRows, name: str, metadata: Metadata) -> None:
        """Write rows to the file `name`, a million tokens at a time; it appears when it is whole.

        Nothing is left behind if it fails.
        """
        hidden = f".{name}.{uuid.uuid4().hex}"
        schema = rows.table(0, 1).schema.with_metadata(metadata)
        try:
            with (
                self.system.open_output_stream(f"{self.base}/{hidden}") as sink,
                pq.ParquetWriter(sink, schema) as to,
            ):
                for table in rows.tables():
                    to.write_table(table)
            self.publish(hidden, name)
        except BaseException:
            with suppress(OSError):
                self.system.delete_file(f"{self.base}/{hidden}")
            raise

    def publish(self, hidden: str, name: str) -> None:
        """Rename a hidden file to its name."""
        self.system.move(f"{self.base}/{hidden}", f"{self.base}/{name}")


def cut(packing: Packing, plan: Plan, count: int | None) -> tuple[dict[str, Plan], Metadata]:
    """Return the plans of `count` shards of like size, by file name, and the digest of the set.

    The digest, as metadata, is of everything that determines the contents. By default there is a
    shard for about `SHARD_TOKENS` tokens. Raises if there are too few rows.
    """
    if not len(plan):
        raise nothing_left(plan.counts)
    if count is not None and count > len(plan):
        raise ValueError(
            f"num_shards={count}: wanted at most as many as there are rows, {len(plan):,}"
        )
    count = int(count or max(1, min(len(plan), round(int(plan.lengths.sum()) / SHARD_TOKENS))))
    hashed = hashlib.sha256(repr((__version__, count, packing)).encode())
    for array in (plan.documents, plan.offsets, plan.lengths, plan.bounds):
        hashed.update(np.ascontiguousarray(array).data)
    edges = [len(plan) * number // count for number in range(count + 1)]
    names = [NAME.format(number, count) for number in range(count)]
    parts = {name: plan[a:b] for name, (a, b) in zip(names, pairwise(edges), strict=True)}
    return parts, {SET: hashed.hexdigest().encode()}


def pack_shards(
    dataset: Any,
    max_length: int,
    path: str | os.PathLike[str],
    strategy: Strategy = "best_fit",
    *,
    num_shards: int | None = None,
    shard: int | None = None,
    seed: int = 0,
    overflow: Overflow = "error",
    max_documents: int | None = None,
    drop_columns: Collection[str] = (),
    first_position: int = 0,
    mask_first_label: bool = True,
) -> Shards:
    """Write packed rows of a tokenized dataset as parquet files, and return them as `Shards`.

    The rows of all shards, one after the other, are those that `autopack.pack` gives for the same
    plan, in the same order. A file, such as `rows-00000-of-00016.parquet`, appears under its name
    when it is whole.

    A `datasets.Dataset` is read in place, a million tokens at a time. With `shard` one job writes
    one shard, and reads only the tokens of its documents; jobs need nothing of each other. A
    `ray.data.Dataset` is packed by the workers of Ray: its examples are numbered in their order,
    their lengths gathered, planned by this process, and brought to the task that writes their
    shard. Ray keeps them meanwhile, on disk when memory ends. A task holds the documents of a
    shard.

    Args:
        dataset: a `datasets.Dataset` or a `ray.data.Dataset`, of documents as `autopack.pack` takes
            them.
        max_length: the most tokens of a row.
        path: a folder, which all workers reach: a path, or an address that `pyarrow.fs` knows.
        num_shards: the number of files; by default, about 34 million tokens make one.
        shard: the one of `num_shards` to write, for a `datasets.Dataset`; all by default.
        strategy, seed, overflow, max_documents: see `autopack.packing.plan`.
        drop_columns, first_position, mask_first_label: see `autopack.pack`.

    Returns a `Shards`: the files that were written, their rows, tokens and fill.

    Raises:
        InvalidPacking: for examples that cannot be packed, as `autopack.pack` does, by their number
            in the dataset.
        ValueError: for options that are out of range, unknown, or contradict each other, and for a
            folder that is not empty. For one `shard`, others of the same set may be in it.
        ImportError: if pyarrow is missing: `pip install "autopack[data]"`.
    """
    planned = {
        "strategy": strategy,
        "seed": seed,
        "overflow": overflow,
        "max_documents": max_documents,
    }
    packing = Packing(max_length, planned, drop_columns, first_position, mask_first_label)
    check_options(pack_shards, locals())
    if shard is not None and (num_shards is None or shard >= num_shards):
        raise ValueError(f"shard={shard}: wanted one below num_shards={num_shards}")
    folder = Folder(path)
    if derives_from(dataset, "Dataset", "ray.data"):
        from autopack.packing.on_ray import pack_ray

        if shard is not None:
            raise ValueError(
                f"shard={shard}: Ray shares the shards of its dataset out by itself; leave it out"
            )
        names, rows = pack_ray(dataset, packing, folder, partial(cut, count=num_shards))
    elif derives_from(dataset, "Dataset", "datasets"):
        documents = Documents.of_dataset(dataset, packing.drop_columns)
        whole = packing.plan(documents.lengths)
        parts, digest = cut(packing, whole, num_shards)
        names = [*parts] if shard is None else [[*parts][shard]]
        folder.prepare(None if shard is None else names[0], digest)
        kinds = features_of(dataset, PlannedRows(documents, whole, packing)).arrow_schema.metadata
        for name in names:
            folder.write(PlannedRows(documents, parts[name], packing), name, {**kinds, **digest})
        rows = whole if shard is None else parts[names[0]]
    else:
        raise no_examples(
            f"wanted a Dataset of datasets or of ray.data, found {type(dataset).__name__}; pass "
            "one split at a time, each with a path of its own, and each dataset.shard(...) of a "
            "stream to autopack.pack"
        )
    files, tokens = tuple(map(folder.address, names)), int(rows.lengths.sum())
    of_rows = rows.max_length, rows.counts, rows.fill, rows.padding
    made = Shards(files, len(rows), tokens, *of_rows)
    logger.log(made.counts.level, "Packed: %r, %r", made, made.counts)
    return made


def shard_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the files that `pack_shards` wrote to a folder, in the order of their rows.

    They can be loaded by anything that reads parquet files. Raises `InvalidPacking` unless all
    shards are there, each under its own name, and of one set: of the same plan and options.
    """
    folder = Folder(path)
    found = {name: int(named[2]) for name in folder.names() if (named := NAMED.fullmatch(name))}
    if not found:
        raise bad_file(
            f"{folder.path}: found no shards; wanted files such as {NAME.format(0, 16)!r}"
        )
    count = min(found.values())
    wanted = [NAME.format(number, count) for number in range(count)]
    if differ := min({*wanted} ^ found.keys(), default=""):
        raise bad_file(
            f"{folder.path}: wanted the {count} shards of one set; {differ!r} is "
            f"{'of another, keep that elsewhere' if differ in found else 'missing, write it'}"
        )
    digest = folder.digest(wanted[0])
    if other := [name for name in wanted if folder.digest(name) != digest]:
        raise bad_file(
            f"{folder.path}: {other[0]!r} is of another plan than {wanted[0]!r}; write all anew"
        )
    return [folder.address(name) for name in wanted]

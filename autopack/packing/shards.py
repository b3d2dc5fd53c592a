"""Packed rows beyond one machine: `pack_shards` writes the rows of a plan as parquet files.

The engines are third-party: datasets, of which every job of an array writes a shard, and Ray Data
(`on_ray`), which schedules the whole. This module has the plan, the documents of a shard, and rows
made of them as `autopack.pack` does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from autopack.integrations.trainers import derives_from
from autopack.packing.checks import bad_file, check_ints, no_examples
from autopack.packing.dataset import packing_of
from autopack.packing.lengths import Overflow
from autopack.packing.plans import Strategy

if TYPE_CHECKING:
    from autopack.packing.parts import Shards

logger = logging.getLogger(__name__)


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
    """Write packed rows of a tokenized dataset as parquet files `rows-00000-of-00016.parquet` and
    so on.

    The rows of all shards, one after the other, are those that `autopack.pack` gives for the same
    plan, in the same order. A file appears under its name when it is whole.

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
    planned: dict[str, Any] = {"strategy": strategy, "seed": seed, "overflow": overflow}
    planned["max_documents"] = max_documents
    packing = packing_of("autopack.packing.pack_shards")(
        max_length, planned, drop_columns, first_position, mask_first_label
    )
    from autopack.packing.parts import Folder, pack_own

    check_ints(True, num_shards=num_shards, shard=shard)
    if shard is not None and (num_shards is None or shard >= num_shards):
        raise ValueError(f"shard={shard}: wanted one below num_shards={num_shards}")
    num_shards = None if num_shards is None else int(num_shards)
    folder = Folder(path)
    if derives_from(dataset, "Dataset", "ray.data"):
        from autopack.packing.on_ray import pack_ray

        if shard is not None:
            raise ValueError(
                f"shard={shard}: Ray shares the shards of its dataset out by itself; leave it out",
            )
        made = pack_ray(dataset, packing, folder, num_shards)
    elif derives_from(dataset, "Dataset", "datasets"):
        made = pack_own(dataset, packing, folder, num_shards, shard)
    else:
        found = f"found {type(dataset).__name__}"
        if derives_from(dataset, "DatasetDict", "datasets"):
            found += (
                "; pass one split at a time, such as dataset['train'], each with a path of its own"
            )
        if derives_from(dataset, "IterableDataset", "datasets"):
            found += "; pack each dataset.shard(...) of a stream by autopack.pack"
        raise no_examples(f"wanted a Dataset of datasets or of ray.data, {found}")
    logger.log(made.counts.level, "Packed: %r, %r", made, made.counts)
    return made


def shard_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the files that `pack_shards` wrote to a folder, in the order of their rows.

    They can be loaded by anything that reads parquet files. Raises `InvalidPacking` unless all
    shards are there, each under its own name, and of one set: of the same plan and options.
    """
    from autopack.packing.parts import NAME, NAMED, Folder

    folder = Folder(path)
    found = {name: int(named[2]) for name in folder.names() if (named := NAMED.fullmatch(name))}
    if not found:
        raise bad_file(
            f"{folder.path}: found no shards; wanted files such as {NAME.format(0, 16)!r}"
        )
    count = min(found.values())
    wanted = [NAME.format(number, count) for number in range(count)]
    if others := found.keys() - {*wanted}:
        raise bad_file(
            f"{folder.path}: found shards of several sets, {min(others)!r} too; keep one set in a "
            "folder",
        )
    if missing := [name for name in wanted if name not in found]:
        raise bad_file(
            f"{folder.path}: found no {missing[0]!r}; {len(missing)} of {count} shards are "
            "missing; write those"
        )
    marks = [folder.mark(name) for name in wanted]
    if other := [name for name, marked in zip(wanted, marks, strict=True) if marked != marks[0]]:
        raise bad_file(
            f"{folder.path}: {other[0]!r} is of another plan than {wanted[0]!r}; write all anew"
        )
    return [folder.address(name) for name in wanted]

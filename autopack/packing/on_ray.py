"""Shards by Ray: measure documents in place, plan here, and make rows in tasks.

Ray reads, brings the documents of a shard together, and repeats tasks whose worker died. A document
is known by its number in the order of the data.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from autopack.errors import InvalidPacking
from autopack.packing.checks import bounds_of, no_examples, other_data, renumbered, unusable
from autopack.packing.dataset import Packing, PlannedRows
from autopack.packing.documents import Documents, columns_kept, from_columns
from autopack.packing.plans import Plan


def pack_ray(data: Any, packing: Packing, folder: Any, cut: Any) -> tuple[list[str], Plan]:
    """Write the shards of a `ray.data.Dataset`; return their names, and the plan of all their rows.

    `folder` is an `autopack.packing.shards.Folder`, and `cut` is of the same module.
    """
    folder.prepare(None, {})
    blocks, of_blocks, schema = _measured(data, packing)
    firsts, lengths = bounds_of([*map(len, of_blocks)]), np.concatenate(of_blocks)
    whole = packing.plan(lengths)
    of_names, digest = cut(packing, whole)
    works, names = [], [*of_names]
    for part in of_names.values():
        numbers, places = np.unique(part.documents, return_inverse=True)
        works.append((replace(part, documents=places), numbers, lengths[numbers]))
    parts = _spread(blocks, firsts, [numbers for _, numbers, _ in works], schema.names)
    del blocks  # so that Ray may forget those that have been spread
    task, about = ray.remote(write_shard), (folder, digest, packing, schema)
    of_shards = zip(names, works, parts, strict=True)
    tasks = [task.remote(*about, name, *work, *held) for name, work, held in of_shards]
    del parts
    try:
        for each in tasks:
            _result(each)
    finally:
        ray.wait(tasks, num_returns=len(tasks))  # none goes on writing
    if {*names} - {*folder.names()}:
        raise ValueError(
            f"path={folder.path!r}: workers wrote shards that are not here; name a folder that "
            "all workers and this process reach"
        )
    return names, whole


def _result(task: Any, before: int = 0) -> Any:
    """Return a task's result; raise its `InvalidPacking` itself, examples counted from `before`."""
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, InvalidPacking):
            raise
        with renumbered(range(before, 1 << 62)):
            raise error.cause from None


def _measured(data: Any, packing: Packing) -> tuple[list[Any], list[np.ndarray], pa.Schema]:
    """Return references to blocks with documents, their documents' lengths, a common schema."""
    task = ray.remote(measure)
    every, before = [], 0
    try:
        with ExitStack() as stack:
            # Blocks in order, also of files, by which documents always get the same numbers: asked
            # of the dataset's own context, and of the one that releases before 2.60 give to copies
            # of it.
            for context in (data.context, ray.data.DataContext.get_current()):
                options = context.execution_options
                stack.callback(setattr, options, "preserve_order", options.preserve_order)
                options.preserve_order = True
            given = data.materialize().to_arrow_refs()
        for block, measured in zip(
            given, [task.remote(block, packing) for block in given], strict=True
        ):
            every.append((block, *_result(measured, before)))
            before += len(every[-1][1])
        if not before:
            raise no_examples("wanted at least one example, found an empty dataset")
        blocks, lengths, schemas = map(list, zip(*(e for e in every if len(e[1])), strict=True))
        return blocks, lengths, pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise unusable(
            f"blocks have unlike values in a column: {error}; cast it, or name it in drop_columns"
        ) from error


def _spread(
    blocks: list[Any], firsts: np.ndarray, needed: list[np.ndarray], names: list[str]
) -> list[list[Any]]:
    """Return, for each shard, references to the parts of all blocks with its documents.

    `firsts`, (blocks + 1,), bound the numbers of the documents of each block; `needed` are the
    sorted numbers of the documents of each shard.
    """
    task = ray.remote(spread).options(num_returns=len(needed))
    of_shards = [np.split(numbers, np.searchsorted(numbers, firsts[1:-1])) for numbers in needed]
    moved: list[list[Any]] = []
    for number, block in enumerate(blocks):
        chosen = [of_blocks[number] - firsts[number] for of_blocks in of_shards]
        parts: Any = task.remote(block, names, chosen)
        moved.append(parts if len(needed) > 1 else [parts])
    return [list(parts) for parts in zip(*moved, strict=True)]


def measure(block: pa.Table, packing: Packing) -> tuple[np.ndarray, pa.Schema]:
    """Return the lengths of a block's documents, and the schema of the columns that rows keep."""
    if not block.num_rows:  # which may lack columns
        return np.zeros(0, np.int64), block.schema
    table = plain(block, columns_kept(block.column_names, packing.drop_columns))
    return Documents(table).lengths, table.schema.remove_metadata()


def spread(block: pa.Table, names: list[str], chosen: list[np.ndarray]) -> Any:
    """Return a table per shard of these rows of a block; for a single shard, the table itself."""
    table = plain(block, names)
    parts = [table.take(numbers) for numbers in chosen]
    return parts if len(parts) > 1 else parts[0]


def write_shard(
    folder: Any,
    digest: dict[bytes, bytes],
    packing: Packing,
    schema: pa.Schema,
    name: str,
    plan: Plan,
    numbers: np.ndarray,
    lengths: np.ndarray,
    *parts: pa.Table,
) -> None:
    """Write the rows of `plan`, of the documents in `parts`, to the shard `name`.

    `numbers` and `lengths` are the documents' own in the whole data set; raises if lengths differ.
    Columns have the types of all blocks together. A part without values in a column has none.
    """
    given = [schema.empty_table(), *(plain(part, schema.names) for part in parts)]
    with renumbered(numbers):
        documents = Documents(pa.concat_tables(given, promote_options="permissive"))
        if (wrong := documents.lengths != lengths).any():
            index = int(wrong.argmax())
            raise other_data(
                f"example {index} has {documents.lengths[index]} tokens, of which the plan has "
                f"{lengths[index]}; Ray made a block again, and it was another one"
            )
        folder.write(PlannedRows(documents, plan, packing), name, digest)


def plain(table: pa.Table, names: list[str]) -> pa.Table:
    """Return the columns of a Ray block that are in `names`, with lists in place of tensors."""
    table = table.select([name for name in table.column_names if name in names])
    of_ray = [field.name for field in table.schema if isinstance(field.type, pa.BaseExtensionType)]
    lists = from_columns({name: table.column(name).to_pylist() for name in of_ray})
    for name in of_ray:
        table = table.set_column(table.column_names.index(name), name, lists.column(name))
    return table

"""Shards by Ray: measure documents in place, plan here, and make rows in tasks.

Ray reads, brings the documents of a shard together, and repeats tasks whose worker died. A document
is known by its number in the order of the data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data.block import BlockAccessor

from autopack.errors import InvalidPacking
from autopack.packing.checks import in_the_whole
from autopack.packing.documents import Documents, Taker, carried
from autopack.packing.lengths import Counts, bounds_of
from autopack.packing.parts import (
    NAME,
    Folder,
    Shards,
    Written,
    edges_of,
    mark_of,
    tables_of,
    tokens_of,
    total,
)
from autopack.packing.plans import Plan
from autopack.packing.rows import Packing, nothing_left


def pack_ray(data: Any, packing: Packing, folder: Folder, plan: Any, num_shards: int | None) -> Shards:
    """Write the shards of a `ray.data.Dataset`; see `autopack.packing.pack_shards`."""
    folder.prepare()
    with _in_order(data):
        found, counts = (_of_blocks if plan == "shard" else _of_plan)(data, packing, folder, plan, num_shards)
    if {part.name for part in found} - set(folder.names()):
        way = "name a folder that all workers and this process reach"
        raise ValueError(f"path={folder.path!r}: workers wrote shards that are not here; {way}")
    return folder.shards(found, packing.max_length, counts)


@contextmanager
def _in_order(data: Any) -> Iterator[None]:
    """Let Ray Data keep blocks in order, also of files, so that documents always get the same
    numbers."""
    # The dataset's own context, and the one that releases before 2.60 give to copies of it.
    found = [context.execution_options for context in (data.context, ray.data.DataContext.get_current())]
    before = [options.preserve_order for options in found]
    for options in found:
        options.preserve_order = True
    try:
        yield
    finally:
        for options, kept in reversed([*zip(found, before, strict=True)]):
            options.preserve_order = kept


def _result(task: Any, before: int = 0) -> Any:
    """Return the result of a task; raise its `InvalidPacking` as if there were no Ray.

    Examples of the task come after so many others.
    """
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, InvalidPacking):
            raise
        with in_the_whole(range(before, 1 << 62)):
            raise InvalidPacking(error.cause.message, code=error.cause.code) from None


def _of_plan(
    data: Any, packing: Packing, folder: Folder, plan: Any, num_shards: int | None
) -> tuple[list[Written], Counts]:
    """Write the shards of one plan of all documents."""
    blocks, lengths, schema = _measured(data, packing)
    if plan == "all":
        plan = packing.plan(np.concatenate(lengths))
    firsts = bounds_of([len(measured) for measured in lengths])
    planned, edges = tokens_of(plan, int(firsts[-1])), edges_of(plan, num_shards)
    shards = [plan[first:end] for first, end in pairwise(edges)]
    needed = [np.unique(shard.documents) for shard in shards]
    cuts = [np.searchsorted(numbers, firsts) for numbers in needed]
    moving = ray.remote(spread).options(num_returns=len(shards))
    moved: list[list[Any]] = []
    for number, first in enumerate(firsts[:-1]):
        chosen = [numbers[cut[number] : cut[number + 1]] - first for numbers, cut in zip(needed, cuts, strict=True)]
        of_block: Any = moving.remote(blocks[number], schema, chosen)
        moved.append(of_block if len(shards) > 1 else [of_block])
    del blocks  # so that Ray may forget those that have been spread
    marked, writing = mark_of(packing, len(shards), plan), ray.remote(write_shard)
    tasks = []
    with folder.undone(marked):
        for number, (shard, numbers, parts) in enumerate(zip(shards, needed, zip(*moved, strict=True), strict=True)):
            here = replace(shard, documents=np.searchsorted(numbers, shard.documents))
            name = NAME.format(number, len(shards))
            about = here, planned[numbers], numbers, packing.first_position
            tasks.append(writing.remote(folder, marked, name, *about, *parts))
        del moved, of_block, parts
        try:
            return [_result(task) for task in tasks], plan.counts
        finally:
            ray.wait(tasks, num_returns=len(tasks))  # before anything is undone


def _measured(data: Any, packing: Packing) -> tuple[list[Any], list[np.ndarray], pa.Schema]:
    """Return the blocks that have documents, the lengths of those, and the schema of all."""
    task = ray.remote(measure)
    blocks, lengths, schemas, before = [], [], [], 0
    try:
        given = data.materialize().to_arrow_refs()
        for block, measured in zip(given, [task.remote(block, packing) for block in given], strict=True):
            found, schema = _result(measured, before)
            if len(found):
                blocks.append(block)
                lengths.append(found)
                schemas.append(schema)
                before += len(found)
        if not blocks:
            raise nothing_left(Counts(0, 0))
        return blocks, lengths, pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        way = "cast it, or name it in drop_columns"
        raise InvalidPacking(f"blocks have unlike values in a column: {error}; {way}", code="unusable-data") from error


def _of_blocks(
    data: Any, packing: Packing, folder: Folder, plan: Any, num_shards: int | None
) -> tuple[list[Written], Counts]:
    """Write a shard of each block that has rows, planned by itself; name them when all are
    there."""
    marked, task = mark_of(packing, num_shards, None), ray.remote(write_block)
    if num_shards is not None:
        data = data.repartition(num_shards)
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # tasks at a time
    waiting: deque[Any] = deque()
    counts: list[Counts] = []
    found: list[Written] = []

    def end_one() -> None:
        made, written = _result(waiting.popleft(), sum(before.documents for before in counts))
        counts.append(made)
        found.extend([] if written is None else [written])
        if written is not None and written.schema != found[0].schema:
            one, other = ({f"{field.name}: {field.type}" for field in part.schema} for part in (found[0], written))
            unlike = ", ".join(sorted(one ^ other))
            raise InvalidPacking(
                f"blocks have unlike columns ({unlike}); cast or fill them, or use drop_columns", code="unusable-data"
            )

    try:
        for bundle in data.iter_internal_ref_bundles():
            for block in bundle.block_refs:
                waiting.append(task.remote(block, packing, folder, marked))
                if len(waiting) > most:
                    end_one()
        while waiting:
            end_one()
        if not found:
            raise nothing_left(total(counts))
        if num_shards is not None and len(found) != num_shards:
            raise ValueError(
                f"num_shards={num_shards}: only {len(found)} of so many blocks have documents; ask for fewer"
            )
        named = [part._replace(name=NAME.format(number, len(found))) for number, part in enumerate(found)]
        with folder.undone(marked):
            for hidden, part in zip(found, named, strict=True):
                folder.publish(hidden.name, part.name)
        return named, total(counts)
    finally:
        for rest in waiting:
            with suppress(Exception):
                found += filter(None, [ray.get(rest)[1]])
        for part in found:
            folder.forget(part.name)


def measure(block: pa.Table, packing: Packing) -> tuple[np.ndarray, pa.Schema]:
    """Return the lengths of the documents of a block, and its columns."""
    table = plain(block)
    if not table.num_rows:  # which may lack columns
        return np.zeros(0, np.int64), table.schema
    lengths = Documents(table, None, packing.drop_columns).lengths
    return lengths, table.select(carried(table.column_names, packing.drop_columns)).schema.remove_metadata()


def spread(block: pa.Table, schema: pa.Schema, chosen: list[np.ndarray]) -> Any:
    """Return the documents of a block that each shard needs, in the types of all blocks together; a
    block without values in a column has none."""
    table = plain(block)
    columns = {}
    for field in schema:
        known = field.name in table.column_names
        columns[field.name] = (table.column(field.name) if known else pa.nulls(table.num_rows)).cast(field.type)
    table = pa.table(columns, schema)
    parts = [table.take(numbers) for numbers in chosen]
    return parts if len(parts) > 1 else parts[0]


def write_shard(
    folder: Folder,
    marked: str,
    name: str,
    plan: Plan,
    planned: np.ndarray,
    numbers: np.ndarray,
    first_position: int,
    *parts: pa.Table,
) -> Written:
    """Write the rows of a plan of the documents in these parts, which have `numbers` in the
    whole."""
    take = Taker(pa.concat_tables(parts))
    with in_the_whole(numbers):
        return folder.write(tables_of(take, plan, planned, first_position), marked, name)


def write_block(block: Any, packing: Packing, folder: Folder, marked: str) -> tuple[Counts, Written | None]:
    """Pack the documents of a block by themselves, and write their rows under a hidden name."""
    table = plain(BlockAccessor.for_block(block).to_arrow())
    if not table.num_rows:
        return Counts(0, 0), None
    plan = packing.plan(Documents(table, None, packing.drop_columns).lengths)
    if not len(plan):
        return plan.counts, None
    take = Taker(table.select(carried(table.column_names, packing.drop_columns)))
    made = tables_of(take, plan, tokens_of(plan, table.num_rows), packing.first_position)
    return plan.counts, folder.write(made, marked)


def plain(table: pa.Table) -> pa.Table:
    """Return a block of Ray with lists in place of tensors, which Ray makes of arrays."""
    for index, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType):
            column = pa.chunked_array([_listed(field, chunk) for chunk in table.column(index).chunks])
            table = table.set_column(index, field.name, column)
    return table


def _listed(field: pa.Field, array: pa.Array) -> pa.Array:
    storage = array.storage
    if pa.types.is_struct(storage.type) and {f.name for f in storage.type} == {"data", "shape"}:
        values, flat = storage.field("data"), pc.all(pc.equal(pc.list_value_length(storage.field("shape")), 1)).as_py()
    else:
        values, flat = storage, len(getattr(field.type, "shape", ())) == 1
    if flat:
        return values
    if not hasattr(field.type, "shape") and values is storage:
        found = f"found {field.type}, wanted what arrow has a type for"
        raise InvalidPacking(
            f"column {field.name!r}: {found}; convert it, or take it out by dataset.drop_columns", code="unusable-data"
        )
    return pa.array([value.tolist() for value in array.to_pylist()])

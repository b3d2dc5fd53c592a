"""Shards by Ray Data: number and measure documents in place, plan here, and make rows in tasks.

Ray reads, keeps blocks in order, brings the documents of a shard together, and repeats failed
tasks. It carries the documents themselves, each with its number, its length, and its pieces: row,
place, offset and length. Tasks raise nothing about data: they return errors, which are raised here,
as they would be without Ray.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import wraps
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from autopack.errors import InvalidPacking
from autopack.packing.checks import IDS, invalid
from autopack.packing.documents import Documents, carried
from autopack.packing.lengths import Counts, bounds_of
from autopack.packing.parts import (
    NAME,
    Folder,
    Shards,
    check_count,
    check_lengths,
    check_sizes,
    count_shards,
    edges_of,
    in_the_whole,
    mark_of,
    planned_lengths,
    renumbered,
    tables,
    total,
)
from autopack.packing.plans import Plan
from autopack.packing.rows import Packing, Rows, nothing_left

NUMBER, TOKENS, PIECES, SHARD = (f"autopack_{name}" for name in ("number", "tokens", "pieces", "shard"))
FIELDS = 4
"""Count of numbers per piece: its row, its place among all pieces, its offset and its length."""
ANSWER = pa.schema({
    "documents": pa.int64(), "error": pa.string(), "tokens": pa.large_binary(), "schema": pa.binary(),
    "counts": pa.string(), "name": pa.string(), "rows": pa.int64(), "written": pa.int64(),
})  # fmt: skip
"""Schema of results of tasks; unknown fields are null."""


def pack_ray(data: Any, packing: Any, folder: Folder, plan: Any, num_shards: int | None) -> Shards:
    """Write the shards of a `ray.data.Dataset`; see `autopack.packing.pack_shards`."""
    with _in_order(data):
        if plan == "shard":
            return _write_blocks(data, packing, folder, num_shards)
        return _write_all(data, packing, folder, plan, num_shards)


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


@contextmanager
def _alike() -> Iterator[None]:
    """Report errors of arrow as blocks whose columns do not go together."""
    try:
        yield
    except pa.ArrowException as error:
        way = "cast it, or name it in drop_columns"
        raise InvalidPacking(f"blocks have unlike values in a column: {error}; {way}") from error


def _write_all(data: Any, packing: Any, folder: Folder, plan: Any, num_shards: int | None) -> Shards:
    """Write the shards of one plan of all documents."""
    folder.prepare(None, 0, "")
    with _alike():
        blocks = data.materialize().to_arrow_refs()
    lengths, sizes, schema = _gather(blocks, packing)
    if plan == "all":
        plan = packing.plan(lengths)
    else:
        check_count(plan, len(lengths))
        check_lengths(plan, lengths, planned_lengths(plan))
    count = count_shards(num_shards, plan)
    edges = edges_of(len(plan), count)
    check_sizes(plan, edges)
    placed, task = zip(blocks, _placed(plan, lengths, sizes), strict=True), ray.remote(spread)
    moved: list[Any] = [task.remote(block, table, schema, edges) for block, table in placed if table.num_rows]
    del blocks  # so that Ray may forget those that have been spread
    writing = {"frame": plan[:0], "edges": edges, "places": plan.bounds[edges], "added": packing.added}
    marked = mark_of(packing, count, plan)
    writing |= {"folder": folder, "marked": marked}
    groups = ray.data.from_arrow_refs(moved).groupby(SHARD, num_partitions=count)
    done = groups.map_groups(write_shard, batch_format="pyarrow", fn_kwargs=writing)
    with folder.undone(marked):
        written = sorted(_results(_batches(done), named=True), key=lambda part: part["name"])
        return _finished(folder, written, count, packing.max_length, plan.counts)


def _write_blocks(data: Any, packing: Any, folder: Folder, num_shards: int | None) -> Shards:
    """Write a shard of each block that has rows, planned by itself; name them when all are
    there."""
    marked = mark_of(packing, num_shards, None)
    folder.prepare(None, 0, marked)
    if num_shards is not None:
        data = data.repartition(num_shards)
    writing = {"packing": packing, "folder": folder, "marked": marked}
    done = data.map_batches(write_block, batch_size=None, batch_format="pyarrow", fn_kwargs=writing)
    found, counts, hidden = [], [], []
    try:
        for part in _results(_batches(done)):
            if not part["documents"]:
                continue
            counts.append(Counts(**json.loads(part["counts"])))
            if part["name"] is None:
                continue
            hidden.append(part["name"])
            found.append(part)
            if part["schema"] != found[0]["schema"]:
                first, other = ({f"{f.name}: {f.type}" for f in _schema(p["schema"])} for p in (found[0], part))
                unlike = ", ".join(sorted(first ^ other))
                raise InvalidPacking(f"blocks have unlike columns ({unlike}); cast or fill them, or use drop_columns")
        if not found:
            raise nothing_left(total(counts))
        if num_shards is not None and len(found) != num_shards:
            raise ValueError(
                f"num_shards={num_shards}: only {len(found)} of so many blocks have documents; ask for fewer"
            )
        with folder.undone(marked):
            for number, part in enumerate(found):
                folder.publish(part["name"], NAME.format(number, len(found)))
                part["name"] = NAME.format(number, len(found))
    finally:
        for name in hidden:
            folder.forget(name)
    return _finished(folder, found, len(found), packing.max_length, total(counts))


def _finished(folder: Folder, found: list[dict[str, Any]], count: int, max_length: int, counts: Counts) -> Shards:
    names = [part["name"] for part in found]
    if len(names) != count:
        raise RuntimeError(f"path={folder.path!r}: Ray has written {len(names)} of {count} shards")
    if set(names) - set(folder.names()):
        way = "name a folder that all workers and this process reach"
        raise ValueError(f"path={folder.path!r}: workers wrote shards that are not here; {way}")
    rows, tokens = (sum(part[name] for part in found) for name in ("rows", "written"))
    return Shards(tuple(map(folder.address, names)), rows, tokens, max_length, counts)


def _gather(blocks: list[Any], packing: Any) -> tuple[np.ndarray, list[int], pa.Schema]:
    """Return tokens of each document, (documents,) int64, documents of each block, and their
    schema."""
    task = ray.remote(measure)
    measured = [task.remote(block, carries=packing.carried) for block in blocks]
    lengths, sizes = [], []
    schemas: dict[bytes, None] = {}
    for part in _results(map(ray.get, measured)):
        sizes.append(part["documents"])
        if part["documents"]:
            lengths.append(np.frombuffer(part["tokens"], np.int64))
            schemas[part["schema"]] = None
    if not lengths:
        raise nothing_left(Counts(0, 0))
    with _alike():
        schema = pa.unify_schemas(map(_schema, schemas), promote_options="permissive")
    return np.concatenate(lengths), sizes, schema


def _schema(serialized: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(serialized))


def _placed(plan: Plan, lengths: np.ndarray, sizes: list[int]) -> Iterator[pa.Table]:
    """Yield, for each block, the number, length and pieces of each of its documents."""
    order = np.argsort(plan.documents, kind="stable")
    owners, rows = plan.documents[order], np.repeat(np.arange(len(plan)), np.diff(plan.bounds))
    for first, end in pairwise(bounds_of(sizes).tolist()):
        begin, stop = np.searchsorted(owners, [first, end])
        places = order[begin:stop]
        pieces = np.stack([rows[places], places, plan.offsets[places], plan.lengths[places]], axis=1)
        bounds = bounds_of(np.bincount(owners[begin:stop] - first, minlength=end - first))
        yield pa.table({NUMBER: np.arange(first, end), TOKENS: lengths[first:end], PIECES: _lists(bounds, pieces)})


def _batches(data: Any) -> Iterator[pa.Table]:
    return data.iter_batches(batch_size=None, batch_format="pyarrow")


def _results(answers: Iterable[pa.Table], named: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the results of tasks in order; raise their errors, by numbers in the whole.

    Tasks have counted examples from the start of a block, unless they are `named` by such numbers
    already.
    """
    before = 0
    for answer in answers:
        for found in answer.to_pylist():
            if found["error"] is not None:
                numbers = range(0 if named else before, 1 << 62)
                raise InvalidPacking(renumbered(found["error"], numbers))
            before += found["documents"]
            yield found


def _answers(work: Callable[..., dict[str, Any]]) -> Callable[..., pa.Table]:
    """Let a task return a row: the result of `work` for its table, or the text of `InvalidPacking`.

    Raised in a task, that would be an error of Ray. Empty tables are skipped; they may lack
    columns.
    """

    @wraps(work)
    def answer(table: pa.Table, **options: Any) -> pa.Table:
        found: dict[str, Any] = dict.fromkeys(ANSWER.names) | {"documents": table.num_rows}
        try:
            if table.num_rows:
                found |= work(plain(table), **options)
        except InvalidPacking as error:
            found["error"] = str(error)
        return pa.Table.from_pylist([found], ANSWER)

    return answer


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
        raise InvalidPacking(f"column {field.name!r}: {found}; convert it, or take it out by dataset.drop_columns")
    return pa.array([value.tolist() for value in array.to_pylist()])


@_answers
def measure(table: pa.Table, carries: dict[str, Any]) -> dict[str, Any]:
    """Return the lengths of the documents of a block, and its columns."""
    if taken := {NUMBER, TOKENS, PIECES, SHARD} & set(table.column_names):
        raise InvalidPacking(f"found a column {min(taken)!r}, which is what autopack calls one of its own; rename it")
    documents = Documents(table, None, **carries)
    schema = table.select(carried(table.column_names, **carries)).schema.remove_metadata()
    return {"tokens": documents.lengths.tobytes(), "schema": schema.serialize().to_pybytes()}


@_answers
def write_block(table: pa.Table, packing: Packing, folder: Folder, marked: str) -> dict[str, Any]:
    """Pack the documents of a block by themselves, and write their rows under a hidden name."""
    documents = Documents(table, None, **packing.carried)
    made = packing.plan(documents.lengths)
    counts = {"counts": json.dumps(asdict(made.counts))}
    if not len(made):
        return counts
    rows = Rows(documents, made, **packing.added)
    name, count, tokens = folder.write(tables(rows), marked)
    schema = rows.table(0, 1).schema.serialize().to_pybytes()
    return {"name": name, "rows": count, "written": tokens, "schema": schema, **counts}


def spread(table: pa.Table, placed: pa.Table, schema: pa.Schema, edges: np.ndarray) -> pa.Table:
    """Return the documents of a block, once for each shard that holds pieces of them, with those
    pieces."""
    pieces, owners = _pieces(placed)
    shards = np.searchsorted(edges, pieces[:, 0], "right") - 1
    # Pieces of a document are in the order of rows, and so of shards.
    first = np.flatnonzero(np.diff(owners, prepend=-1) | np.diff(shards, prepend=-1))
    found = conform(plain(table), schema).take(owners[first])
    for name in (NUMBER, TOKENS):
        found = found.append_column(name, placed.column(name).take(owners[first]))
    found = found.append_column(PIECES, _lists(np.append(first, len(pieces)), pieces))
    return found.append_column(SHARD, pa.array(shards[first]))


def _lists(bounds: np.ndarray, pieces: np.ndarray) -> pa.Array:
    """Return pieces (pieces, FIELDS) as a list of numbers for each document, cut at `bounds`."""
    return pa.LargeListArray.from_arrays(pa.array(bounds * FIELDS), pa.array(pieces.reshape(-1)))


def _pieces(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces in such lists, (pieces, FIELDS) int64, and the table row of each."""
    lists = table.column(PIECES).combine_chunks()
    owners = np.repeat(np.arange(table.num_rows), pc.list_value_length(lists).to_numpy() // FIELDS)
    return lists.flatten().to_numpy().reshape(-1, FIELDS), owners


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a block in the types of all blocks together; a block without values has
    none."""
    columns = {}
    for field in schema:
        known = field.name in table.column_names
        found = table.column(field.name) if known else pa.nulls(table.num_rows)
        columns[field.name] = found.cast(field.type)
    return pa.table(columns, schema)


@_answers
def write_shard(
    table: pa.Table,
    frame: Plan,
    edges: np.ndarray,
    places: np.ndarray,
    added: dict[str, Any],
    folder: Folder,
    marked: str,
) -> dict[str, Any]:
    """Write the rows of a shard, made of the documents that were brought here in any order.

    `frame` is the plan without its rows. Shard s has the rows `edges[s]` to `edges[s + 1]`, made of
    the pieces `places[s]` to `places[s + 1]`.
    """
    shard = table.column(SHARD)[0].as_py()
    table = table.take(np.argsort(table.column(NUMBER).to_numpy())).combine_chunks()
    numbers, tokens = (table.column(name).to_numpy() for name in (NUMBER, TOKENS))
    pieces, owners = _pieces(table)
    order = np.argsort(pieces[:, 1])
    rows, place, offsets, lengths = pieces[order].T
    if not np.array_equal(place, np.arange(places[shard], places[shard + 1])):
        raise RuntimeError(
            f"shard {shard}: Ray has not brought the documents of this shard together; nothing is written"
        )
    bounds = bounds_of(np.bincount(rows - edges[shard]))
    plan = replace(frame, documents=owners[order], offsets=offsets, lengths=lengths, bounds=bounds)
    with in_the_whole(numbers):
        documents = Documents(table.drop_columns([NUMBER, TOKENS, PIECES, SHARD]), None, None, ())
        if (other := documents.lengths != tokens).any():
            index = int(other.argmax())
            found = f"found {documents.lengths[index]} tokens, and {tokens[index]} when lengths were gathered"
            way = "a block that Ray lost and made again must be what it was: read data that do not change"
            raise invalid(index, IDS, f"{found}; {way}", "column ")
        name = NAME.format(shard, len(edges) - 1)
        name, count, written = folder.write(tables(Rows(documents, plan, **added)), marked, name)
    return {"name": name, "rows": count, "written": written}

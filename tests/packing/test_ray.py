"""Shards that Ray writes, where it is otherwise than datasets: blocks, tensors, workers that
die."""

import os
import signal

import datasets
import numpy as np
import pyarrow as pa
import pytest

import autopack
from autopack.packing import pack_shards, shard_files, shards
from tests.packing.engines import LENGTHS, blocks_of, dataset_of, load, visible
from tests.packing.test_pack import examples
from tests.support.processes import python
from tests.support.refusals import refused

on_ray = pytest.importorskip("autopack.packing.on_ray")
pytestmark = pytest.mark.exhaustive


def test_files_are_numbered_in_their_order(ray, tmp_path):
    whole = dataset_of(examples(LENGTHS))
    for number, (a, b) in enumerate([(0, 5), (5, 40), (40, 60)]):
        whole.select(range(a, b)).to_parquet(tmp_path / f"part-{number}.parquet")
    data = ray.data.read_parquet(str(tmp_path), override_num_blocks=5)
    written = pack_shards(data, 32, tmp_path / "rows", num_shards=3)
    assert load(written.files)[:] == autopack.pack(whole, 32)[:]


def test_what_ray_made_of_arrays_and_of_pandas_is_packed_as_lists_are(ray, tmp_path):
    ids = [[1, 2, 3], [4, 5], [6]]
    plain = [{"input_ids": i, "pair": [[t, t] for t in i], "text": str(i)} for i in ids]

    def tokenize(batch):
        found = [plain[i] for i in batch["id"]]
        arrays = {name: [np.array(each[name]) for each in found] for name in ("input_ids", "pair")}
        return arrays | {"matrix": np.ones((len(found), 2, 2)), "text": [e["text"] for e in found]}

    data = ray.data.range(3, override_num_blocks=1).map_batches(tokenize)
    found = load(pack_shards(data, 4, tmp_path / "a", drop_columns=("matrix",)).files)
    assert found[:] == autopack.pack(dataset_of(plain), 4)[:]
    with refused("unusable-data", match="example 0, column 'matrix': found 2 values for 3 tokens"):
        pack_shards(data, 4, tmp_path / "b")
    same = ray.data.from_numpy(np.arange(12).reshape(3, 4)).rename_columns({"data": "input_ids"})
    found = load(pack_shards(same, 4, tmp_path / "c", "sequential").files)
    assert found["input_ids"][:] == np.arange(12).reshape(3, 4).tolist()
    table = pa.table({"input_ids": [[1, 2], [3], [4]], "text": ["a", "b", "c"]})
    made = pack_shards(ray.data.from_pandas(table.to_pandas()), 2, tmp_path / "d", num_shards=2)
    assert load(made.files)[:] == autopack.pack(datasets.Dataset(table), 2)[:]


def test_blocks_without_a_value_do_not_decide_what_a_column_is(ray, tmp_path):
    made = [{"input_ids": [i + 1], "source": None if i < 4 else f"s{i}"} for i in range(8)]
    tables = [pa.Table.from_pylist(made[:4]), pa.Table.from_pylist(made[4:])]
    found = load(pack_shards(ray.data.from_arrow(tables), 2, tmp_path / "a", num_shards=4).files)
    assert found[:] == autopack.pack(dataset_of(made), 2)[:]
    unlike = [pa.table({"input_ids": [[1]], "a": [1]}), pa.table({"input_ids": [[1]], "a": ["b"]})]
    with refused("unusable-data", match="blocks have unlike values in a column: .*'?a'?"):
        pack_shards(ray.data.from_arrow(unlike), 2, tmp_path / "b")
    with refused("no-examples", match="empty dataset"):
        pack_shards(ray.data.from_arrow(tables[0].slice(4)), 4, tmp_path / "d")
    objects = ray.data.from_items([{"input_ids": [1], "object": object()}])
    with refused(
        "unusable-data",
        match="column 'object': found values that make no column .*name it in drop_columns",
    ):
        pack_shards(objects, 2, tmp_path / "c")


def test_a_block_that_ray_made_again_is_what_it_was(tmp_path):
    """A task looks whether each document is as long as it was when it was planned."""
    plan, numbers, folder = (
        autopack.packing.plan([3] * 2, 6),
        np.array([2, 3]),
        shards.Folder(tmp_path),
    )
    tables = [pa.table({"input_ids": block}) for block in ([[2, 2, 2]], [[3]])]
    about = folder, {}, 0, tables[0].schema, "rows-00000-of-00001.parquet"
    with refused("other-data", match="^example 3 has 1 tokens, of which the plan has 3"):
        on_ray.write_shard(*about, plan, numbers, np.array([3, 3]), *tables)
    assert not os.listdir(tmp_path)


def dying(stage, flag):
    """A folder that kills the first process that comes to a stage of writing a file."""

    class Dying(shards.Folder):
        def die(self, here):
            if here == stage and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def write(self, rows, name, metadata):
            first, *others = rows.tables()

            def tables():
                yield first
                self.die("within")
                yield from others

            rows.tables = tables
            super().write(rows, name, metadata)

        def publish(self, hidden, name):
            self.die("whole")
            super().publish(hidden, name)
            self.die("named")

    return Dying


@pytest.mark.parametrize("stage", ["within", "whole", "named"])
def test_who_writes_a_shard_may_be_killed(ray, stage, tmp_path, monkeypatch):
    """Nothing is lost or there twice: Ray runs a task again."""
    flag, folder = tmp_path / "killed", tmp_path / "rows"
    monkeypatch.setattr(shards, "Folder", dying(stage, flag))
    made = examples(LENGTHS)
    pack_shards(blocks_of(ray)(made, 20), 32, folder, num_shards=3)
    assert flag.exists()
    assert visible(folder) == [f"rows-{shard:05d}-of-00003.parquet" for shard in range(3)]
    assert load(shard_files(folder))[:] == autopack.pack(dataset_of(made), 32)[:]


def test_the_example_runs(tmp_path):
    done = python("examples/pack_with_ray.py", "--documents", "2000", "--path", tmp_path / "rows")
    assert "the same rows as one process gives" in done.stdout
    assert len(shard_files(tmp_path / "rows")) == 8

"""Shards that Ray writes, where it is otherwise than datasets: blocks, tensors, workers that die."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import autopack
from autopack.packing import parts
from tests.packing.engines import LENGTHS, load, visible
from tests.packing.test_pack import examples
from tests.support.refusals import refused

datasets = pytest.importorskip("datasets")
on_ray: Any = pytest.importorskip("autopack.packing.on_ray")
pytestmark = pytest.mark.exhaustive


def test_files_are_numbered_in_their_order(ray, tmp_path):
    made = examples(LENGTHS)
    whole = datasets.Dataset.from_list(made)
    for number, (a, b) in enumerate([(0, 5), (5, 40), (40, 60)]):
        whole.select(range(a, b)).to_parquet(tmp_path / f"part-{number}.parquet")
    data = ray.data.read_parquet(str(tmp_path), override_num_blocks=5)
    written = autopack.packing.pack_shards(data, 32, tmp_path / "rows", num_shards=3)
    assert load(written.files)[:] == autopack.pack(whole, 32)[:]


def test_what_ray_made_of_arrays_is_packed_as_lists_are(ray, tmp_path):
    ids = [[1, 2, 3], [4, 5], [6]]

    def tokenize(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        found = [ids[i] for i in batch["id"]]
        return {
            "input_ids": [np.array(i) for i in found],
            "pair": [np.array([[t, t] for t in i]) for i in found],
            "vector": np.ones((len(found), 2)) * batch["id"][:, None],
            "matrix": np.ones((len(found), 2, 2)),
            "text": [str(i) for i in found],
        }

    data = ray.data.range(3, override_num_blocks=1).map_batches(tokenize)
    dropped = ("vector", "matrix")
    found = load(autopack.packing.pack_shards(data, 4, tmp_path / "a", drop_columns=dropped).files)
    plain = [{"input_ids": i, "pair": [[t, t] for t in i], "text": str(i)} for i in ids]
    assert found[:] == autopack.pack(datasets.Dataset.from_list(plain), 4)[:]
    with refused("unusable-data", match="example 0, column 'vector': found 2 values for 3 tokens"):
        autopack.packing.pack_shards(data, 4, tmp_path / "b", drop_columns=("matrix",))
    same = ray.data.from_numpy(np.arange(12).reshape(3, 4)).rename_columns({"data": "input_ids"})
    found = load(autopack.packing.pack_shards(same, 4, tmp_path / "c", "sequential").files)
    assert found["input_ids"][:] == np.arange(12).reshape(3, 4).tolist()


def test_blocks_without_a_value_do_not_decide_what_a_column_is(ray, tmp_path):
    made = [{"input_ids": [i + 1], "source": None if i < 4 else f"s{i}"} for i in range(8)]
    tables = [pa.Table.from_pylist(made[:4]), pa.Table.from_pylist(made[4:])]
    found = load(autopack.packing.pack_shards(ray.data.from_arrow(tables), 2, tmp_path / "a", num_shards=4).files)
    assert found[:] == autopack.pack(datasets.Dataset.from_list(made), 2)[:]
    written = autopack.packing.pack_shards(ray.data.from_arrow(tables), 2, tmp_path / "b", plan="shard")
    assert load(written.files)["source"][:] == [[None, None], [None, None], ["s7", "s6"], ["s5", "s4"]]
    unlike = [pa.table({"input_ids": [[1]], "a": [1]}), pa.table({"input_ids": [[1]], "a": ["b"]})]
    with refused("unusable-data", match="blocks have unlike values in a column: .*'?a'?"):
        autopack.packing.pack_shards(ray.data.from_arrow(unlike), 2, tmp_path / "c")


def test_options_and_folders_are_refused_before_anything_is_read(ray, tmp_path):
    def fail(batch: Any) -> Any:
        raise AssertionError("read")

    data = ray.data.range(3).map_batches(fail)
    (tmp_path / "file").touch()
    for options, words in (
        ({"shard": 0, "num_shards": 2}, "shard=0: Ray shares"),
        ({"path": tmp_path}, "found 'file' in it"),
        ({"strategy": "best"}, "strategy='best'"),
    ):
        with pytest.raises(ValueError, match=words):
            autopack.packing.pack_shards(data, **{"max_length": 4, "path": tmp_path / "rows", **options})
    with refused("no-examples", match="empty dataset"):
        autopack.packing.pack_shards(ray.data.from_arrow(pa.table({"input_ids": [[1]]}).slice(1)), 4, tmp_path / "rows")


def dying() -> type:
    """Made in a function, so that workers get the class itself and not its name: they know nothing of tests."""

    class Dying(parts.Folder):
        """A folder whose first write of each name kills the worker, in the middle of a file."""

        def write(self, tables: Any, marked: str, name: str) -> Any:
            flag = Path(f"{self.base}/../{name}.died")

            def until_then() -> Iterator[pa.Table]:
                for table in tables:
                    yield table
                    if not flag.exists():
                        flag.touch()
                        os._exit(1)

            return parts.Folder.write(self, until_then(), marked, name)

    return Dying


def test_a_worker_that_dies_is_made_good(blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "Folder", dying())
    made = examples(LENGTHS)
    written = autopack.packing.pack_shards(blocks(made, 20, 40), 32, tmp_path / "rows", num_shards=2)
    assert len(list(tmp_path.glob("*.died"))) == 2
    assert visible(tmp_path / "rows") == [Path(file).name for file in written.files]
    assert (
        load(autopack.packing.shard_files(tmp_path / "rows"))[:]
        == autopack.pack(datasets.Dataset.from_list(made), 32)[:]
    )


def test_a_block_that_ray_made_again_is_what_it_was(tmp_path):
    """A task looks whether each document is as long as it was when it was planned."""
    plan, numbers, folder = autopack.packing.plan([3] * 2, 6), np.array([2, 3]), parts.Folder(tmp_path)
    blocks, work = [[[2, 2, 2]], [[3]]], parts.Work(plan, np.array([3, 3]), numbers)
    tables = [pa.table({"input_ids": block}) for block in blocks]
    about = folder, "", 0, tables[0].schema, "rows-00000-of-00001.parquet"
    with refused("other-data", match="^example 3 has 1 tokens, of which the plan has 3"):
        on_ray.write_shard(*about, work, *tables)
    assert not os.listdir(tmp_path)


def test_blocks_may_be_of_pandas_and_hold_no_objects(ray, tmp_path):
    plain = pa.table({"input_ids": [[1, 2], [3], [4]], "text": ["a", "b", "c"]})
    made = autopack.packing.pack_shards(ray.data.from_pandas(plain.to_pandas()), 2, tmp_path / "a", num_shards=2)
    assert load(made.files)[:] == autopack.pack(datasets.Dataset(plain), 2)[:]
    objects = ray.data.from_items([{"input_ids": [1], "object": object()}])
    with refused("unusable-data", match="column 'object': found .*; convert it, or take it out"):
        autopack.packing.pack_shards(objects, 2, tmp_path / "b")


def test_two_runs_write_the_same_bytes(blocks, tmp_path):
    made = examples(LENGTHS)
    for name, cuts in (("a", (20, 40)), ("b", (3,))):
        autopack.packing.pack_shards(blocks(made, *cuts), 32, tmp_path / name, num_shards=3)
    for name in visible(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_example_runs(tmp_path):
    command = [sys.executable, "examples/pack_with_ray.py", "--documents", "2000", "--path", str(tmp_path / "rows")]
    tree = Path(__file__).parents[2]
    found = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=found, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "the same rows as one process gives" in done.stdout
    assert len(autopack.packing.shard_files(tmp_path / "rows")) == 8

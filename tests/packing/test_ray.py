"""Shards that Ray writes: the rows of `pack`, however blocks are cut, whatever fails on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import autopack
from autopack.packing import parts
from tests.packing.test_pack import examples
from tests.support.refusals import refused

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray: Any = pytest.importorskip("ray")
pytest.importorskip("ray.data")
on_ray: Any = pytest.importorskip("autopack.packing.on_ray")
datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

pytestmark = pytest.mark.exhaustive
LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 30, 60)]


@pytest.fixture(scope="module", autouse=True)
def two_workers() -> Iterator[None]:
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning", object_store_memory=200 << 20
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def blocks(made: list[dict[str, Any]], *cuts: int) -> Any:
    """A dataset of Ray with blocks that end at these examples."""
    table = datasets.Dataset.from_list(made).data.table
    return ray.data.from_arrow([table.slice(a, b - a) for a, b in pairwise([0, *cuts, len(made)])])


def load(files: Any) -> Any:
    return datasets.load_dataset("parquet", data_files=list(files), split="train")


def visible(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if not name.startswith("."))


@pytest.mark.parametrize(
    ("options", "count", "cuts"),
    [
        ({}, 4, (20, 21, 21, 50)),
        ({"strategy": "random", "seed": 3}, 7, ()),
        ({"max_length": 16, "overflow": "split"}, 5, (0, 1, 30)),
        ({"max_length": 16, "overflow": "drop", "drop_columns": ("labels", "pair")}, 1, (59, 60)),
        ({"max_length": 16, "overflow": "truncate", "ranks": 2, "cost": autopack.packing.CostModel(0, 1)}, 2, (7,)),
        ({"strategy": "fixed_length", "first_position": 2}, 22, tuple(range(0, 60, 3))),
    ],
)
def test_ray_writes_the_rows_of_pack(options, count, cuts, tmp_path):
    options = {"max_length": 32, **options}
    made = [{k: v for k, v in e.items() if k != "kind"} for e in examples(LENGTHS)]
    wanted = autopack.pack(datasets.Dataset.from_list(made), **options)
    data = blocks(made, *cuts)
    written = autopack.packing.pack_shards(data, path=tmp_path / "rows", num_shards=count, **options)
    assert list(written.files) == autopack.packing.shard_files(tmp_path / "rows")
    assert visible(tmp_path / "rows") == sorted(os.listdir(tmp_path / "rows"))
    found = load(written.files)
    assert found.features == wanted.features
    assert found[:] == wanted[:]
    assert (written.rows, written.tokens) == (len(wanted), sum(map(len, wanted["input_ids"])))
    assert not data.context.execution_options.preserve_order
    sizes = [pq.read_metadata(file).num_rows for file in written.files]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_any_documents_are_kept(seed, tmp_path, monkeypatch):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, int(rng.integers(1, 40))).tolist()
    every = [{"input_ids": [1000 * i + t for t in range(n)], "text": f"t{i}"} for i, n in enumerate(lengths)]
    strategy, overflow = rng.choice(["best_fit", "fixed_length", "random"]), rng.choice(["split", "truncate"])
    plan = autopack.packing.plan(lengths, 16, str(strategy), overflow=str(overflow), seed=seed)
    data = blocks(every, *sorted(rng.integers(0, len(lengths) + 1, 3).tolist()))
    count = int(rng.integers(1, min(len(plan), 6) + 1))
    written = autopack.packing.pack_shards(data, 16, tmp_path, plan=plan, num_shards=count)
    wanted = autopack.pack(datasets.Dataset.from_list(every), 16, strategy, overflow=overflow, seed=seed)
    assert load(written.files)[:] == wanted[:]
    other = autopack.packing.plan([lengths[0] % 16 + 1, *lengths[1:]], 16, overflow="truncate")
    with refused("other-data", match="^example 0 has"):
        autopack.packing.pack_shards(data, 16, tmp_path / "other", plan=other)


def test_files_are_numbered_in_their_order(tmp_path):
    made = examples(LENGTHS)
    whole = datasets.Dataset.from_list(made)
    for number, (a, b) in enumerate([(0, 5), (5, 40), (40, 60)]):
        whole.select(range(a, b)).to_parquet(tmp_path / f"part-{number}.parquet")
    data = ray.data.read_parquet(str(tmp_path), override_num_blocks=5)
    written = autopack.packing.pack_shards(data, 32, tmp_path / "rows", num_shards=3)
    assert load(written.files)[:] == autopack.pack(whole, 32)[:]


def test_what_ray_made_of_arrays_is_packed_as_lists_are(tmp_path):
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


def test_blocks_without_a_value_do_not_decide_what_a_column_is(tmp_path):
    made = [{"input_ids": [i + 1], "source": None if i < 4 else f"s{i}"} for i in range(8)]
    tables = [pa.Table.from_pylist(made[:4]), pa.Table.from_pylist(made[4:])]
    found = load(autopack.packing.pack_shards(ray.data.from_arrow(tables), 2, tmp_path / "a", num_shards=4).files)
    assert found[:] == autopack.pack(datasets.Dataset.from_list(made), 2)[:]
    written = autopack.packing.pack_shards(ray.data.from_arrow(tables), 2, tmp_path / "b", plan="shard")
    assert load(written.files)["source"][:] == [[None, None], [None, None], ["s7", "s6"], ["s5", "s4"]]
    unlike = [pa.table({"input_ids": [[1]], "a": [1]}), pa.table({"input_ids": [[1]], "a": ["b"]})]
    with refused("unusable-data", match="blocks have unlike values in a column: .*'?a'?"):
        autopack.packing.pack_shards(ray.data.from_arrow(unlike), 2, tmp_path / "c")


def test_each_block_can_be_planned_by_itself(tmp_path):
    made = examples(LENGTHS)
    wanted = [autopack.pack(datasets.Dataset.from_list(made[a:b]), 32) for a, b in pairwise((0, 20, 21, 60))]
    written = autopack.packing.pack_shards(blocks(made, 0, 20, 21), 32, tmp_path / "a", plan="shard")
    assert visible(tmp_path / "a") == sorted(os.listdir(tmp_path / "a")) == [Path(f).name for f in written.files]
    assert len(autopack.packing.shard_files(tmp_path / "a")) == 3
    assert load(written.files)[:] == datasets.concatenate_datasets(wanted)[:]
    assert written.counts == autopack.packing.plan(LENGTHS, 32).counts
    assert written.rows == sum(map(len, wanted))
    assert (
        len(autopack.packing.pack_shards(blocks(made, 20), 32, tmp_path / "b", plan="shard", num_shards=4).files) == 4
    )
    dropped = autopack.packing.pack_shards(
        blocks(examples([9, 9, 3]), 2), 4, tmp_path / "c", plan="shard", overflow="drop"
    )
    assert (len(dropped.files), dropped.counts.dropped, dropped.rows) == (1, 2, 1)
    nothing = blocks(examples([5] * 60), 30)
    with refused("does-not-fit", match="no document is left of 60"):
        autopack.packing.pack_shards(nothing, 4, tmp_path / "d", plan="shard", overflow="drop")
    with pytest.raises(ValueError, match="num_shards=9: only 3 of so many blocks have documents"):
        autopack.packing.pack_shards(blocks(examples([9, 9, 3])), 9, tmp_path / "e", plan="shard", num_shards=9)
    assert os.listdir(tmp_path / "e") == []


@pytest.mark.parametrize("plan", ["all", "shard"])
def test_what_is_wrong_with_an_example_is_raised_by_its_number(plan, tmp_path):
    def write(made: list[dict[str, Any]], **options: Any) -> Any:
        return autopack.packing.pack_shards(
            blocks(made, 20, 21), **{"max_length": 32, "path": tmp_path, "plan": plan, **options}
        )

    made = examples(LENGTHS)
    made[41]["input_ids"][0] = -5
    with refused("unusable-data", match="^example 41, column 'input_ids': found a token id below 0"):
        write(made)
    assert visible(tmp_path) == []
    made[41] = {**made[41], **{key: [] for key in ("input_ids", "labels", "score", "word", "pair")}}
    with refused("unusable-data", match="^example 41, column 'input_ids': found no tokens"):
        write(made)
    lengths = [*[1] * 25, 30, *LENGTHS[26:]]
    with refused("does-not-fit", match="^example \\[25\\] is .*, over the 20 tokens of a row.*; raise max_length"):
        write(examples(lengths), max_length=20)
    classed = [{"input_ids": [1] * 9, "label": 1}] * 30
    with refused("unusable-data", match="are cut into pieces, and 'label' is one per document"):
        write(classed, overflow="split", max_length=4)
    with refused("unusable-data", match="tokenize first"):
        write([{"text": "a"}] * 30)
    with refused("unusable-data", match="found no column 'none'"):
        write(made, drop_columns=("none",))
    with refused("no-examples", match="empty dataset"):
        autopack.packing.pack_shards(
            ray.data.from_arrow(pa.table({"input_ids": [[1]]}).slice(1)), 4, tmp_path, plan=plan
        )


def test_options_and_folders_are_refused_before_anything_is_read(tmp_path):
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
    with pytest.raises(ValueError, match="num_shards=4: wanted at most as many as there are rows, 3"):
        autopack.packing.pack_shards(blocks(examples([4, 4, 4])), 4, tmp_path / "rows", num_shards=4)
    with refused("other-data", match="the plan is of 2 documents, and the dataset has 3"):
        autopack.packing.pack_shards(
            blocks(examples([4, 4, 4])), 4, tmp_path / "rows", plan=autopack.packing.plan([4, 4], 4)
        )


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


def test_a_worker_that_dies_is_made_good(tmp_path, monkeypatch):
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
    blocks, work = [[[2, 2, 2]], [[3]]], on_ray.Work(plan, np.array([3, 3]), numbers)
    tables = [pa.table({"input_ids": block}) for block in blocks]
    about = folder, "", 0, tables[0].schema, "rows-00000-of-00001.parquet"
    with refused("other-data", match="^example 3 has 1 tokens, of which the plan has 3"):
        on_ray.write_shard(*about, work, *tables)
    assert not os.listdir(tmp_path)


def test_blocks_may_be_of_pandas_and_hold_no_objects(tmp_path):
    plain = pa.table({"input_ids": [[1, 2], [3], [4]], "text": ["a", "b", "c"]})
    made = autopack.packing.pack_shards(ray.data.from_pandas(plain.to_pandas()), 2, tmp_path / "a", num_shards=2)
    assert load(made.files)[:] == autopack.pack(datasets.Dataset(plain), 2)[:]
    objects = ray.data.from_items([{"input_ids": [1], "object": object()}])
    with refused("unusable-data", match="column 'object': found .*; convert it, or take it out"):
        autopack.packing.pack_shards(objects, 2, tmp_path / "b")


def test_two_runs_write_the_same_bytes(tmp_path):
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

"""Shards of packed rows: whoever writes them, they are the rows of `pack`; a set that is not whole is noticed."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import autopack
from autopack.errors import InvalidPacking
from autopack.packing import documents, parts, rows
from tests.packing.test_pack import examples
from tests.support.refusals import refused

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 30, 60)]


@pytest.fixture
def dataset() -> Any:
    return datasets.Dataset.from_list(examples(LENGTHS))


def load(files: Any) -> Any:
    """Shards, one after the other, as a dataset."""
    return datasets.load_dataset("parquet", data_files=list(files), split="train")


def visible(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if not name.startswith("."))


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "random", "seed": 3},
        {"max_length": 16, "overflow": "split"},
        {"max_length": 16, "overflow": "truncate", "drop_columns": ("kind",), "first_position": 2},
        {"max_length": 16, "overflow": "drop", "drop_columns": ("labels", "pair")},
        {"strategy": "fixed_length"},
        {"ranks": 2, "cost": autopack.packing.CostModel(0, 1), "max_documents": 3},
    ],
)
def test_shards_hold_the_rows_of_pack(dataset, count, options, tmp_path):
    options = {"max_length": 32, **options}
    wanted = autopack.pack(dataset, **options)
    made = autopack.packing.pack_shards(dataset, path=tmp_path / "rows", num_shards=count, **options)
    assert made.files == tuple(autopack.packing.shard_files(tmp_path / "rows"))
    assert visible(tmp_path / "rows") == [f"rows-{i:05d}-of-{count:05d}.parquet" for i in range(count)]
    found = load(made.files)
    assert found.features == wanted.features
    assert found[:] == wanted[:]
    assert made.rows == len(wanted)
    assert made.tokens == sum(map(len, wanted["input_ids"]))
    assert made.padding == len(wanted) * options["max_length"] - made.tokens
    assert made.fill == pytest.approx(made.tokens / (made.tokens + made.padding))
    sizes = [pq.read_metadata(file).num_rows for file in made.files]
    assert max(sizes) - min(sizes) <= 1


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=30),
    count=st.integers(1, 6),
    block=st.sampled_from([1, 30, 1 << 20]),
    overflow=st.sampled_from(["truncate", "split", "drop"]),
    strategy=st.sampled_from(["best_fit", "random", "fixed_length"]),
    picked=st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_jobs_of_an_array_write_what_one_process_packs(
    lengths, count, block, overflow, strategy, picked, monkeypatch, tmp_path_factory
):
    monkeypatch.setattr(rows, "BLOCK", block)
    folder = tmp_path_factory.mktemp("job")
    cuts = [0, len(lengths) // 3, len(lengths)]
    every = [{"input_ids": [1000 * i + t for t in range(n)], "text": f"t{i}"} for i, n in enumerate(lengths)]
    data = datasets.concatenate_datasets([datasets.Dataset.from_list(every[a:b]) for a, b in pairwise(cuts) if b > a])
    if picked:
        data = data.select(np.random.default_rng(1).permutation(len(data)))
    plan = autopack.packing.plan([len(ids) for ids in data["input_ids"]], 16, strategy, overflow=overflow)
    options = {"strategy": strategy, "overflow": overflow}
    if not len(plan):
        with refused("does-not-fit", match="no document is left"):
            autopack.packing.pack_shards(data, 16, folder / "rows", num_shards=1, **options)
        return
    plan.save(folder / "plan")
    count = min(count, len(plan))
    for shard in np.random.default_rng(len(lengths)).permutation(count).tolist():
        loaded = autopack.packing.Plan.load(folder / "plan")
        given = {"plan": loaded} if shard % 2 else options  # jobs that plan, and jobs that are given the plan
        made = autopack.packing.pack_shards(data, 16, folder / "rows", num_shards=count, shard=shard, **given)
        assert made.files == (str(folder / "rows" / f"rows-{shard:05d}-of-{count:05d}.parquet"),)
    found = load(autopack.packing.shard_files(folder / "rows"))
    assert found[:] == autopack.pack(data, 16, **options)[:]


def test_a_shard_reads_the_tokens_of_its_own_documents_alone(dataset, tmp_path, monkeypatch):
    plan = autopack.packing.plan(LENGTHS, 32)
    read: list[int] = []

    class Spied(documents.Taker):
        def __call__(self, numbers: np.ndarray) -> Any:
            read.extend(numbers.tolist())
            return super().__call__(numbers)

    monkeypatch.setattr(parts, "Taker", Spied)
    monkeypatch.setattr(documents.Documents, "of_dataset", None)
    autopack.packing.pack_shards(dataset, 32, tmp_path, plan=plan, num_shards=4, shard=1)
    edges = np.arange(5) * len(plan) // 4
    assert sorted(read) == sorted(plan[edges[1] : edges[2]].documents.tolist())


def test_a_plan_per_shard_is_that_of_the_shard_alone(dataset, tmp_path):
    made = autopack.packing.pack_shards(dataset, 32, tmp_path / "all", plan="shard", num_shards=4)
    one = autopack.packing.pack_shards(dataset, 32, tmp_path / "one", plan="shard", num_shards=4, shard=2)
    alone = [autopack.pack(dataset.shard(4, i, contiguous=True), 32) for i in range(4)]
    assert load(made.files)[:] == datasets.concatenate_datasets(alone)[:]
    assert load(one.files)[:] == alone[2][:]
    assert (made.counts.documents, one.counts.documents) == (60, 15)
    assert one.rows == len(alone[2])
    assert made.fill <= autopack.packing.plan(LENGTHS, 32).fill
    long = datasets.Dataset.from_list(examples([5] * 8))
    with refused("does-not-fit", match="no document is left of 2"):
        autopack.packing.pack_shards(long, 4, tmp_path / "none", plan="shard", num_shards=4, shard=2, overflow="drop")
    assert not visible(tmp_path / "none")


def test_classes_keep_their_names_and_images_stay_images(tmp_path):
    pictures = [Image.new("RGB", (2, 2), (i, 0, 0)) for i in range(3)]
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3], [4]], "label": [1, 0, 1], "image": pictures})
    data = data.cast_column("label", datasets.ClassLabel(names=["no", "yes"])).cast_column("image", datasets.Image())
    found = load(autopack.packing.pack_shards(data, 2, tmp_path, num_shards=2).files)
    assert found.features == autopack.pack(data, 2).features
    assert found.features["label"].feature.names == ["no", "yes"]
    assert sorted(sorted(p.getpixel((0, 0))[0] for p in row["image"]) for row in found) == [[0], [1, 2]]


def test_padding_is_removed_and_formats_are_of_documents(tmp_path):
    data = datasets.Dataset.from_dict(
        {"input_ids": [[9, 1, 2], [3, 9, 9]], "attention_mask": [[0, 1, 1], [1, 0, 0]], "other": [["a"], ["b", "c"]]}
    )
    wanted = autopack.pack(data, 4)
    for number, form in enumerate((None, "torch", "numpy")):
        found = load(autopack.packing.pack_shards(data.with_format(form), 4, tmp_path / str(number)).files)
        assert found[:] == wanted[:]
    with refused("other-data", match="example 0 has 2 tokens, of which the plan has 3"):
        autopack.packing.pack_shards(data, 4, tmp_path / "padded", plan=autopack.packing.plan([3, 3], 4))


def test_the_number_of_shards_follows_the_tokens(dataset, tmp_path, monkeypatch):
    assert len(autopack.packing.pack_shards(dataset, 32, tmp_path / "few").files) == 1
    monkeypatch.setattr(parts, "SHARD_TOKENS", 100)
    assert len(autopack.packing.pack_shards(dataset, 32, tmp_path / "many").files) == round(sum(LENGTHS) / 100)
    assert len(autopack.packing.pack_shards(dataset, 32, tmp_path / "own", plan="shard").files) == round(
        sum(LENGTHS) / 100
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard": 0}, "shard=0: wanted one below num_shards=None"),
        ({"shard": 3, "num_shards": 3}, "shard=3: wanted one below num_shards=3"),
        ({"shard": True, "num_shards": 3}, "shard=True"),
        ({"num_shards": 0}, "num_shards=0"),
        ({"num_shards": 1000}, "num_shards=1000: wanted at most as many as there are rows"),
        ({"num_shards": 61, "plan": "shard"}, "num_shards=61: wanted at most as many as there are examples, 60"),
        ({"plan": "each"}, "plan='each': wanted 'all', 'shard' or an autopack.packing.Plan"),
        ({"plan": LENGTHS}, "wanted 'all', 'shard' or an autopack.packing.Plan"),
        ({"plan": autopack.packing.plan(LENGTHS, 32), "seed": 1}, "seed=1: a plan is given"),
        ({"plan": autopack.packing.plan(LENGTHS, 40)}, "max_length=32: the plan is of rows of 40 tokens"),
        ({"plan": autopack.packing.plan(LENGTHS[1:], 32)}, "the plan is of 59 documents, and the dataset has 60"),
        ({"plan": autopack.packing.plan(LENGTHS[::-1], 32)}, ", of which the plan has"),
        ({"plan": autopack.packing.plan([min(n, 9) for n in LENGTHS], 32)}, "tokens, of which the plan has 9"),
        ({"strategy": "best"}, "strategy='best'"),
        ({"drop_columns": "labels"}, "drop_columns='labels': wanted several"),
        ({"drop_columns": ("none",)}, "found no column 'none'"),
        ({"max_length": 8}, "over the 8 tokens of a row"),
        ({"path": ""}, "wanted a folder"),
        ({"path": "nothing://here"}, "wanted a folder"),
    ],
)
def test_what_cannot_be_written_is_refused(dataset, options, words, tmp_path):
    with pytest.raises(ValueError, match=".") as refusal:
        autopack.packing.pack_shards(dataset, **{"max_length": 32, "path": tmp_path / "rows", **options})
    assert words in str(refusal.value)
    assert not (tmp_path / "rows").exists() or not visible(tmp_path / "rows")


def test_data_of_other_kinds_are_refused_with_a_way_out(dataset, tmp_path):
    for data, words in (
        (datasets.DatasetDict(train=dataset), "pass one split at a time, such as dataset\\['train'\\]"),
        (dataset.to_iterable_dataset(), "autopack.pack"),
        (dataset.to_list(), "found list"),
        (dataset.select([]), "empty dataset"),
        (dataset.remove_columns("input_ids"), "tokenize first"),
    ):
        with pytest.raises(InvalidPacking, match=words):
            autopack.packing.pack_shards(data, 32, tmp_path)


def test_errors_name_examples_by_their_number_in_the_whole(tmp_path):
    made = examples(LENGTHS)
    made[41]["input_ids"][0] = -5
    plan = autopack.packing.plan(LENGTHS, 32, "sequential")
    for options in ({"plan": plan}, {"strategy": "sequential"}):
        with refused("unusable-data", match="example 41, column 'input_ids': found a token id below 0"):
            autopack.packing.pack_shards(datasets.Dataset.from_list(made), 32, tmp_path, num_shards=4, **options)
        for file in tmp_path.iterdir():
            file.unlink()
    made[41] = {**made[41], **{key: [] for key in ("input_ids", "labels", "score", "word", "pair")}}
    with refused("unusable-data", match="example 41, column 'input_ids': found no tokens"):
        autopack.packing.pack_shards(datasets.Dataset.from_list(made), 32, tmp_path, plan=plan, num_shards=4)


def test_a_folder_holds_one_set(dataset, tmp_path):
    def write(**options: Any) -> Any:
        return autopack.packing.pack_shards(dataset, **{"max_length": 32, "path": tmp_path, "num_shards": 3, **options})

    write(shard=1)
    with refused("bad-file", match="found no 'rows-00000-of-00003.parquet'; 2 of 3 shards are missing"):
        autopack.packing.shard_files(tmp_path)
    with pytest.raises(ValueError, match="found 'rows-00001-of-00003.parquet', which is whole; delete it"):
        write(shard=1)
    with pytest.raises(ValueError, match="wanted a new folder, or an empty one"):
        write()
    for other in (
        {"seed": 1},
        {"first_position": 2},
        {"max_length": 40},
        {"plan": "shard"},
        {"drop_columns": ("kind",)},
    ):
        with pytest.raises(ValueError, match="of another plan or other options"):
            write(shard=0, **other)
    with pytest.raises(ValueError, match="wanted a new folder"):
        write(shard=0, num_shards=4)
    write(shard=0, max_length=np.int64(32), num_shards=np.int32(3))
    write(shard=2, plan=autopack.packing.plan(LENGTHS, 32))
    assert len(autopack.packing.shard_files(tmp_path)) == 3
    (tmp_path / ".hidden").touch()
    assert len(autopack.packing.shard_files(str(tmp_path))) == 3

    other = tmp_path / "other"
    autopack.packing.pack_shards(dataset, 32, other, num_shards=3, seed=1)
    os.replace(other / "rows-00002-of-00003.parquet", tmp_path / "rows-00002-of-00003.parquet")
    with refused("bad-file", match="'rows-00002-of-00003.parquet' is of another plan"):
        autopack.packing.shard_files(tmp_path)
    (tmp_path / "rows-00000-of-00002.parquet").touch()
    with refused("bad-file", match="several sets"):
        autopack.packing.shard_files(tmp_path)
    with refused("bad-file", match="found no shards"):
        autopack.packing.shard_files(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="found a file"):
        write(path=tmp_path / "file")
    with pytest.raises(ValueError, match="found 'file' in it"):
        write(path=tmp_path, shard=0, num_shards=9)


@pytest.mark.parametrize("plan", ["all", "shard"])
def test_a_set_that_fails_midway_can_be_written_again(plan, tmp_path):
    made = examples(LENGTHS)
    for key in ("input_ids", "labels", "score", "word", "pair"):
        made[-1][key] = made[-1][key] * 2
    whole = datasets.Dataset.from_list(made)
    planned = autopack.packing.plan(LENGTHS, 32, "sequential") if plan == "all" else plan
    options = {} if plan == "all" else {"strategy": "sequential", "max_documents": 3}
    with pytest.raises(InvalidPacking):
        autopack.packing.pack_shards(whole, 32, tmp_path, plan=planned, num_shards=4, **options)
    assert os.listdir(tmp_path) == []
    autopack.packing.pack_shards(whole.select(range(59)), 64, tmp_path, num_shards=4, **options)
    assert len(autopack.packing.shard_files(tmp_path)) == 4


def test_a_job_that_is_interrupted_leaves_nothing_and_can_be_run_again(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 64)
    plan, calls = autopack.packing.plan(LENGTHS, 32), []
    written = pq.ParquetWriter.write_table

    def interrupted(self: Any, table: Any, *rest: Any, **options: Any) -> None:
        calls.append(table)
        if len(calls) == 3:
            assert visible(tmp_path) == []
            assert len(os.listdir(tmp_path)) == 1
            raise KeyboardInterrupt
        written(self, table, *rest, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        autopack.packing.pack_shards(dataset, 32, tmp_path, plan=plan, num_shards=2, shard=0)
    assert os.listdir(tmp_path) == []
    for shard in range(2):
        autopack.packing.pack_shards(dataset, 32, tmp_path, plan=plan, num_shards=2, shard=shard)
    assert load(autopack.packing.shard_files(tmp_path))[:] == autopack.pack(dataset, 32)[:]


def test_addresses_are_taken_as_paths_are(dataset, tmp_path, monkeypatch):
    made = autopack.packing.pack_shards(dataset, 32, f"file://{tmp_path}/a", num_shards=2)
    assert made.files[0] == f"file://{tmp_path}/a/rows-00000-of-00002.parquet"
    assert visible(tmp_path / "a") == [Path(file).name for file in made.files]
    assert list(made.files) == autopack.packing.shard_files(f"file://{tmp_path}/a/")
    monkeypatch.chdir(tmp_path)
    made = autopack.packing.pack_shards(dataset, 32, "deep/b/", num_shards=2)
    assert made.files[0] == str(tmp_path / "deep" / "b" / "rows-00000-of-00002.parquet")


@pytest.mark.parametrize("name", ["x[1]", "x*", "x?/rows"])
def test_a_folder_whose_name_datasets_takes_for_a_pattern_is_refused(dataset, name, tmp_path):
    """Its files would be written, and not found."""
    for call in (lambda path: autopack.packing.pack_shards(dataset, 32, path), autopack.packing.shard_files):
        with pytest.raises(ValueError, match="which datasets reads as a pattern of names; rename the folder"):
            call(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_what_is_lost_is_logged_and_the_result_is_told(dataset, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "autopack"):
        made = autopack.packing.pack_shards(dataset, 16, tmp_path, overflow="truncate", num_shards=2)
    assert "truncated=" in caplog.text
    assert repr(made).startswith(f"Shards({made.rows:,} rows of 16 tokens in 2 files, fill 0.")
    assert pickle.loads(pickle.dumps(made)) == made


def test_streams_of_shards_go_to_workers(dataset, tmp_path):
    """What is said of `datasets.load_dataset`: every file is a shard of a stream."""
    files = autopack.packing.pack_shards(dataset, 32, tmp_path, num_shards=4).files
    stream = datasets.load_dataset("parquet", data_files=list(files), split="train", streaming=True)
    assert stream.num_shards == 4
    assert list(stream) == list(autopack.pack(dataset, 32))


def test_ray_is_imported_for_its_own_data_alone(tmp_path):
    code = (
        "import sys, datasets, autopack; datasets.disable_progress_bars()\n"
        "data = datasets.Dataset.from_dict({'input_ids': [[1, 2], [3]]})\n"
        f"autopack.packing.pack_shards(data, 4, {str(tmp_path)!r})\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

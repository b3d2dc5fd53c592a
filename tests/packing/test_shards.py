"""Shards of packed rows: whoever writes them, they are the rows of `pack`; a set that is not whole
is noticed."""

import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopack
from autopack.errors import InvalidPacking
from autopack.packing import dataset as of_pack
from autopack.packing import documents, pack_shards, plan, shard_files, shards
from tests.packing.batches import pieces
from tests.packing.engines import LENGTHS, dataset_of, load, visible
from tests.packing.test_pack import examples, featured
from tests.support.refusals import refused


@pytest.fixture
def dataset():
    return datasets.Dataset.from_list(examples(LENGTHS))


@pytest.mark.parametrize(
    ("options", "count", "cuts"),
    [
        ({}, 4, (20, 21, 21, 50)),
        ({"strategy": "sequential", "max_length": 16, "overflow": "split"}, 5, (0, 1, 30)),
        ({"max_length": 16, "overflow": "drop", "drop_columns": ("labels", "pair")}, 1, (59, 60)),
        ({"overflow": "truncate", "max_length": 9, "first_position": 2}, 22, range(0, 60, 3)),
    ],
)
def test_shards_hold_the_rows_of_pack(engine, dataset, options, count, cuts, tmp_path):
    options = {"max_length": 32, **options}
    wanted = autopack.pack(dataset, **options)
    made = pack_shards(
        engine(examples(LENGTHS), *cuts), path=tmp_path / "rows", num_shards=count, **options
    )
    assert made.files == tuple(shard_files(tmp_path / "rows"))
    names = [f"rows-{i:05d}-of-{count:05d}.parquet" for i in range(count)]
    assert visible(tmp_path / "rows") == sorted(os.listdir(tmp_path / "rows")) == names
    found = load(made.files)
    assert found.features == wanted.features
    assert found[:] == wanted[:]
    assert (made.rows, made.tokens) == (len(wanted), sum(map(len, wanted["input_ids"])))
    assert made.padding == len(wanted) * options["max_length"] - made.tokens
    assert repr(made).startswith(f"Shards({made.rows} rows of {options['max_length']} tokens in ")
    sizes = [pq.read_metadata(file).num_rows for file in made.files]
    assert max(sizes) - min(sizes) <= 1


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    count=st.integers(1, 6),
    seed=st.integers(0, 9),
    overflow=st.sampled_from(["truncate", "split", "drop"]),
    block=st.sampled_from([1, 30, of_pack.BLOCK]),
    strategy=st.sampled_from(["best_fit", "sequential"]),
    picked=st.booleans(),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_hold_what_the_plan_says_however_the_table_is_cut_and_jobs_of_an_array_write_them(
    lengths, cuts, count, seed, overflow, block, strategy, picked, monkeypatch, tmp_path_factory
):
    monkeypatch.setattr(of_pack, "BLOCK", block)
    folder = tmp_path_factory.mktemp("job")
    ids = [[1000 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    data = dataset_of([{"input_ids": each, "labels": each} for each in ids], *sorted(cuts))
    if picked:
        chosen = np.random.default_rng(seed).permutation(len(ids))[: max(1, len(ids) // 2)]
        data, ids = data.select(chosen), [ids[i] for i in chosen]
    options = {"strategy": strategy, "overflow": overflow, "seed": seed}
    made = plan([*map(len, ids)], 16, **options)
    if not len(made):
        for write in (
            lambda: autopack.pack(data, 16, **options),
            lambda: pack_shards(data, 16, folder, **options),
        ):
            with refused("does-not-fit", match="no document is left"):
                write()
        return
    packed = autopack.pack(data, 16, **options)
    assert len(packed) == len(made)
    for number, row in enumerate(packed):
        piece = made.pieces(number)
        wanted = zip(made.documents[piece], made.offsets[piece], made.lengths[piece], strict=True)
        assert pieces(row) == [ids[d][o : o + n] for d, o, n in wanted]
        assert pieces(row, "labels") == [[-100, *part[1:]] for part in pieces(row)]
        assert row["position_ids"] == [t for n in made.lengths[piece] for t in range(n)]
    assert data["labels"][:] == ids, "what was packed has not been written to"

    count = min(count, len(made))
    for shard in np.random.default_rng(seed).permutation(count).tolist():
        written = pack_shards(data, 16, folder, num_shards=count, shard=shard, **options)
        assert written.files == (str(folder / f"rows-{shard:05d}-of-{count:05d}.parquet"),)
    assert load(shard_files(folder))[:] == packed[:]


def test_a_shard_reads_the_tokens_of_its_own_documents_alone(dataset, tmp_path, monkeypatch):
    made, read = plan(LENGTHS, 32), []
    values = documents.Documents.values

    def spied(self, numbers, *rest):
        read.append({*numbers.tolist()})
        return values(self, numbers, *rest)

    monkeypatch.setattr(documents.Documents, "values", spied)
    pack_shards(dataset, 32, tmp_path, num_shards=4, shard=1)
    edges = np.arange(5) * len(made) // 4
    of_features, *of_rows = read
    assert of_features == {*made[0].tolist()}
    assert set.union(*of_rows) == {*made[edges[1] : edges[2]].documents.tolist()}


def test_features_stay_and_formats_are_of_documents(tmp_path):
    data = featured()
    wanted = autopack.pack(data, 2)
    made = load(pack_shards(data.with_format("torch"), 2, tmp_path, num_shards=2).files)
    assert made.features == wanted.features
    assert made[:] == wanted[:]


def test_the_number_of_shards_follows_the_tokens(dataset, tmp_path, monkeypatch):
    assert len(pack_shards(dataset, 32, tmp_path / "few").files) == 1
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    assert len(pack_shards(dataset, 32, tmp_path / "many").files) == round(sum(LENGTHS) / 100)


REFUSED = [
    ({"shard": 0}, "shard=0: wanted one below num_shards=None"),
    ({"shard": 3, "num_shards": 3}, "shard=3: wanted one below num_shards=3"),
    ({"num_shards": 0}, "num_shards=0"),
    ({"num_shards": 1000}, "num_shards=1000: wanted at most as many as there are rows"),
    ({"path": ""}, "wanted a folder"),
    ({"path": "nothing://here"}, "wanted a folder"),
]


def test_what_cannot_be_written_is_refused(engine, tmp_path):
    data = engine(examples(LENGTHS), 20, 21)
    of_ray = [
        (
            {"shard": 0, "num_shards": 2},
            "shard=0: Ray shares the shards of its dataset out by itself",
        )
    ]
    for options, words in REFUSED + of_ray * (engine is not dataset_of):
        with pytest.raises(ValueError, match=".") as refusal:
            pack_shards(data, **{"max_length": 32, "path": tmp_path / "rows", **options})
        assert words in str(refusal.value)
        assert not (tmp_path / "rows").exists() or not visible(tmp_path / "rows")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="found 'file' in it"):
        pack_shards(data, 32, tmp_path)


def test_data_of_other_kinds_are_refused_with_a_way_out(dataset, tmp_path):
    for data, words in (
        (datasets.DatasetDict(train=dataset), "pass one split at a time"),
        (dataset.to_iterable_dataset(), "autopack.pack"),
        (dataset.to_list(), "found list"),
        (dataset.select([]), "empty dataset"),
    ):
        with pytest.raises(InvalidPacking, match=words):
            pack_shards(data, 32, tmp_path)


def test_a_folder_holds_one_set(dataset, tmp_path):
    def write(**options):
        return pack_shards(
            dataset, **{"max_length": 32, "path": tmp_path, "num_shards": 3, **options}
        )

    write(shard=1)
    with refused(
        "bad-file", match="wanted the 3 shards of one set; 'rows-00000-of-00003.parquet' is missing"
    ):
        shard_files(tmp_path)
    of_another = "only others of the same plan and options"
    for options, words in (
        ({"shard": 1}, "found 'rows-00001-of-00003.parquet' in it; wanted a new folder"),
        ({}, "wanted a new folder, an empty one"),
        ({"shard": 0, "seed": 1}, of_another),
        ({"shard": 0, "max_length": 40}, of_another),
        ({"shard": 0, "drop_columns": ("kind",)}, of_another),
        ({"shard": 0, "num_shards": 4}, "wanted a new folder"),
    ):
        with pytest.raises(ValueError, match=words):
            write(**options)
    write(shard=0, max_length=np.int64(32), num_shards=np.int32(3))
    write(shard=2)
    (tmp_path / ".hidden").touch()
    (file, *others) = shard_files(str(tmp_path))
    assert len(others) == 2
    whole = Path(file).read_bytes()
    Path(file).write_bytes(whole[: len(whole) // 2])
    with refused("bad-file", match="wanted a parquet file"):
        shard_files(tmp_path)
    Path(file).write_bytes(whole)

    write(path=tmp_path / "other", seed=1)
    os.replace(
        tmp_path / "other" / "rows-00002-of-00003.parquet", tmp_path / "rows-00002-of-00003.parquet"
    )
    with refused("bad-file", match="'rows-00002-of-00003.parquet' is of another plan"):
        shard_files(tmp_path)
    (tmp_path / "rows-00000-of-00002.parquet").touch()
    with refused("bad-file", match="is of another, keep that elsewhere"):
        shard_files(tmp_path)
    with refused("bad-file", match="found no shards"):
        shard_files(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="found a file"):
        write(path=tmp_path / "file")


def test_a_job_that_is_interrupted_leaves_nothing(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(of_pack, "BLOCK", 64)
    calls, written = [], pq.ParquetWriter.write_table

    def interrupted(self, table, *rest, **options):
        calls.append(table)
        if len(calls) == 3:
            assert visible(tmp_path) == []
            assert len(os.listdir(tmp_path)) == 1
            raise KeyboardInterrupt
        written(self, table, *rest, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack_shards(dataset, 32, tmp_path, num_shards=2, shard=0)
    assert os.listdir(tmp_path) == []


def test_addresses_are_taken_as_paths_are(dataset, tmp_path, monkeypatch):
    made = pack_shards(dataset, 32, f"file://{tmp_path}/a", num_shards=2)
    assert made.files[0] == f"file://{tmp_path}/a/rows-00000-of-00002.parquet"
    assert visible(tmp_path / "a") == [Path(file).name for file in made.files]
    assert list(made.files) == shard_files(f"file://{tmp_path}/a/")
    monkeypatch.chdir(tmp_path)
    made = pack_shards(dataset, 32, "deep/b/", num_shards=2)
    assert made.files[0] == str(tmp_path / "deep" / "b" / "rows-00000-of-00002.parquet")

"""Packed data sets: every document once and whole, its columns with it; and rows that train as
documents do alone."""

import logging
import os
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

import autopack
from autopack.errors import InvalidPacking
from tests.packing.batches import documents_of, of_kind, pieces, rows_of
from tests.support.refusals import refused

LENGTHS = (3, 9, 1, 4, 4, 7, 8)


def examples(lengths=LENGTHS):
    """Documents whose every token is known: number * 100 + place."""
    return [
        {
            "input_ids": [i * 100 + t for t in range(n)],
            "labels": [-100 if t < n // 2 else i * 100 + t for t in range(n)],
            "score": [i + t / 8 for t in range(n)],
            "word": [t == 0 for t in range(n)],
            "pair": [[i, t] for t in range(n)],
            "source": f"s{i}",
            "kind": i % 3,
        }
        for i, n in enumerate(lengths)
    ]


def test_padding_of_the_examples_is_removed(door):
    made = [
        {"input_ids": [9, 9, 1, 2], "labels": [None, -100, 1, 2], "attention_mask": [0, 0, 1, 1]},
        {"input_ids": [3, 4, 5, 9], "labels": [3, 4, 5, -100], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [6, 7], "labels": [6, 7], "attention_mask": [1, 1]},
    ]
    (row,) = door(made, 7, strategy="sequential")
    assert pieces(row) == [[1, 2], [3, 4, 5], [6, 7]]
    assert row["labels"] == [-100, 2, -100, 4, 5, -100, 7]
    assert "attention_mask" not in row


def test_columns_are_chosen_and_named_options_are_kept():
    rows = autopack.pack(examples(), 10, drop_columns=("labels", "pair"))
    kept = examples()[0].keys() - {"labels", "pair"}
    assert rows[0].keys() == kept | {"position_ids", "seq_lengths"}
    rows = autopack.pack(examples(), 10, first_position=2)
    assert all(
        row["position_ids"] == [t + 2 for n in row["seq_lengths"] for t in range(n)] for row in rows
    )
    assert {len(row["seq_lengths"]) for row in autopack.pack(examples(), 10, max_documents=1)} == {
        1
    }
    rows = autopack.pack(examples(), 10, "sequential", mask_first_label=False)
    assert [part for row in rows for part in pieces(row, "labels")] == [
        each["labels"] for each in examples()
    ]
    split = datasets.DatasetDict(
        {n: datasets.Dataset.from_list(examples()) for n in ("train", "test")}
    )
    packed = autopack.pack(split, 10)
    assert isinstance(packed, datasets.DatasetDict)
    assert packed["test"][:] == autopack.pack(split["test"], 10)[:]
    streams = {name: each.to_iterable_dataset(num_shards=3) for name, each in split.items()}
    rows = autopack.pack(datasets.IterableDatasetDict(streams), 10)["test"]
    assert sorted(documents_of(rows)) == [each["input_ids"] for each in examples()]
    with refused(
        "does-not-fit", match="split 'train': example \\[1\\] is 9, over the 8 tokens of a row"
    ):
        autopack.pack(split, 8)


def featured():
    """Documents with classes, of themselves and of their tokens, and pictures as red as their
    number."""
    made = {"input_ids": [[1, 2], [3], [4]], "label": [1, 0, 1], "tags": [[0, 1], [1], [0]]}
    made["image"] = [Image.new("RGB", (2, 2), (number, 0, 0)) for number in range(3)]
    data = datasets.Dataset.from_dict(made).cast_column("image", datasets.Image())
    data = data.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    return data.cast_column("tags", datasets.Sequence(datasets.ClassLabel(names=["O", "B"])))


def test_names_of_classes_and_images_stay_and_a_format_is_one_of_documents():
    packed = autopack.pack(featured().with_format("torch"), 4, "sequential")
    assert packed.format["type"] is None
    assert packed.features["label"].feature.names == ["no", "yes"]
    assert packed.features["tags"].feature.names == ["O", "B"]
    assert packed[0]["input_ids"] == [1, 2, 3, 4]
    assert packed[0]["label"] == [1, 0, 1]
    assert packed.with_format("torch")[0]["input_ids"].tolist() == [1, 2, 3, 4]
    pictures = packed[0]["image"]
    assert all(isinstance(picture, Image.Image) for picture in pictures)
    assert [picture.getpixel((0, 0))[0] for picture in pictures] == [0, 1, 2]


def test_positions_of_small_types_restart_where_their_differences_wrap_around():
    positions = np.append(np.arange(256), [0, 1]).astype(np.uint8)
    example = {"input_ids": np.ones(len(positions), np.int64), "position_ids": positions}
    with refused(
        "unusable-data", match="example 0, column 'position_ids': found positions that restart"
    ):
        autopack.pack([example], 1 << 17)


@pytest.mark.parametrize(("change", "options", "words"), rows_of("unpackable"))
def test_what_cannot_be_packed_is_refused_by_name(door, change, options, words):
    plain = {"input_ids": [1, 2, 3]}
    for name, value in change.items():
        if name != "input_ids":
            same = [1, 2, 3] if name in ("labels", "position_ids") else [1, 1, 1]
            plain[name] = value if not isinstance(value, list) else same
    made = [plain, {**plain, **change}, plain]
    with pytest.raises(InvalidPacking) as refusal:
        door(made, **{"max_length": 10, **options})
    assert words in str(refusal.value)


def test_empty_data_and_data_of_other_kinds_are_refused():
    for data, code, words in (
        ([], "no-examples", "empty"),
        (datasets.Dataset.from_dict({"input_ids": []}), "no-examples", "empty"),
        (
            datasets.Dataset.from_dict({"text": ["a"]}),
            "unusable-data",
            "wanted 'input_ids', found \\['text'\\]",
        ),
        (
            [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}],
            "unusable-data",
            "not found, but example 0 has it",
        ),
        ((e for e in examples()), "no-examples", "found generator"),
    ):
        with refused(code, match=words):
            autopack.pack(data, 4)
    with refused("does-not-fit", match="no document is left of 7"):
        autopack.pack([{"input_ids": [1, 2]}] * 7, 1, overflow="drop")
    with refused("unusable-data", match="wanted 'input_ids'"):
        list(autopack.pack(of_kind([{"text": "a"}], "stream"), 4))


def test_what_is_cut_off_is_logged(door, caplog):
    with caplog.at_level(logging.WARNING, "autopack"):
        door(examples(), 8, overflow="truncate")
    assert re.search(r"truncated\W1\b", caplog.text)


def written(packed):
    return {file["filename"] for file in packed.cache_files}


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_lie_in_a_file_that_the_same_arguments_find_again(on_disk, tmp_path):
    dataset = datasets.Dataset.from_list(examples() * 20)
    if on_disk:
        dataset.save_to_disk(tmp_path / "d")
        dataset = datasets.load_from_disk(tmp_path / "d")
    (path,) = written(autopack.pack(dataset, 10))
    assert (Path(path).parent == tmp_path / "d") is on_disk
    changed = os.stat(path).st_mtime_ns
    assert written(autopack.pack(dataset, 10)) == {path}
    assert os.stat(path).st_mtime_ns == changed
    others = [
        {"seed": 1},
        {"max_length": 12},
        {"first_position": 2},
        {"drop_columns": ("pair",)},
        {"groups": "kind"},
    ]
    assert all(written(autopack.pack(dataset, **{"max_length": 10, **o})) != {path} for o in others)
    assert written(autopack.pack(dataset.select(range(50)), 10)) != {path}


def test_several_processes_write_the_rows_that_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("autopack.packing.dataset.BLOCK", 40)
    datasets.Dataset.from_list(examples() * 3).save_to_disk(tmp_path / "d")
    dataset = datasets.load_from_disk(tmp_path / "d")
    one = autopack.pack(dataset, 10)
    alone = one[:]
    for path in written(one):
        os.remove(path)
    both = autopack.pack(dataset, 10, num_proc=2)
    assert len(written(both)) == 2
    assert both[:] == alone
    assert written(autopack.pack(dataset, 10, num_proc=2)) == written(both)

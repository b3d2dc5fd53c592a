"""TensorBoard, Weights & Biases and trackio, told by a real Trainer: what they stored, read from their files."""

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = {"fill", "padding_skipped", "documents_per_row", "real_tokens_per_second", "shared"}


def tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in sorted((folder / "tensorboard").iterdir()):
        events = EventAccumulator(str(file)).Reload()
        for key in events.Tags()["scalars"]:
            yield from ((key, event.value) for event in events.Scalars(key))


def wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for raw in _wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(raw)
        for item in record.history.item:
            yield item.key or "/".join(item.nested_key), json.loads(item.value_json)


def _wandb_records(data):
    """The records of a file of W&B: after a header of 7 bytes, a log of LevelDB, in blocks of 32 KiB."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def trackio(folder):
    with sqlite3.connect(next(folder.glob("trackio/*.db"))) as database:
        for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY id"):
            yield from json.loads(row).items()


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def run(logger, folder, **environment):
    """What a logger has of an enabled run, by key in the order in which it came."""
    folders = {"WANDB_DIR": "", "TRACKIO_DIR": "trackio", "WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}
    own = {name: str(folder / below) for name, below in folders.items()}
    offline = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.logged", logger, str(folder)]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env={**os.environ, **own, **offline, **environment}, **options)
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for key, value in LOGGERS[logger](folder):
        found[key].append(value)
    return found


@pytest.mark.parametrize(
    ("logger", "environment"),
    [
        ("tensorboard", {}),
        pytest.param("wandb", {"WANDB_WATCH": "all"}, marks=pytest.mark.exhaustive),
        pytest.param("trackio", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_columns_are_there_and_are_those_of_the_trainer(logger, environment, tmp_path):
    """Finite numbers all; what was shared has no gaps once something was.

    Of a model that is watched every hundredth call is recorded: a few steps are none, and a twin's calls would be one.
    """
    pytest.importorskip(logger)
    values = run(logger, tmp_path, **environment)
    assert not [key for key in values if "parameters/" in key]
    assert len(values["train/loss"]) == 4
    assert all(type(value) in (int, float) and math.isfinite(value) for each in values.values() for value in each)
    steps = [entry for entry in json.loads((tmp_path / "logs.json").read_text()) if "loss" in entry]
    for name in COLUMNS - {"shared"}:
        assert values[f"train/autopack/{name}"] == pytest.approx([e[f"autopack/{name}"] for e in steps], rel=1e-6)
    counts = {key: len(each) for key, each in values.items() if "autopack/" in key}
    times = {"train/": 4, "train/train_": 1, "eval/": 2}
    assert counts == {f"{prefix}autopack/{name}": number for prefix, number in times.items() for name in COLUMNS}
    shared = values["train/autopack/shared"]
    assert [value > 0 for value in shared] == [True, False, False, True]
    assert shared[1:3] == [0, 0]

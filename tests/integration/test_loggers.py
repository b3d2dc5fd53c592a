"""TensorBoard, Weights & Biases and trackio, told by a real Trainer: what they stored, read from their files."""

from __future__ import annotations

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

from tests.integration.logged import NAMES

ROOT = Path(__file__).parents[2]
COLUMNS = {"fill", "padding_skipped", "documents_per_row", "real_tokens_per_second", "shared"}
_RUN_TIME = ("runtime", "per_second")


def comparable(values):
    """Values of Trainer itself that do not depend on the clock."""
    return {k: v for k, v in values.items() if "autopack/" not in k and not k.endswith(_RUN_TIME)}


def tensorboard(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in sorted((folder / f"tensorboard-{name}").iterdir()):
        events = EventAccumulator(str(file)).Reload()
        for key in events.Tags()["scalars"]:
            yield from ((key, event.value) for event in events.Scalars(key))


def wandb(folder, name):
    from wandb.proto.wandb_internal_pb2 import Record

    for file in folder.glob("wandb/offline-run-*/run-*.wandb"):
        found, is_it = [], False
        for raw in _wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(raw)
            is_it |= record.run.display_name == name
            for item in record.history.item:
                found.append((item.key or "/".join(item.nested_key), json.loads(item.value_json)))
        if is_it:
            yield from found


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


def trackio(folder, name):
    with sqlite3.connect(next(folder.glob("trackio/*.db"))) as database:
        for (row,) in database.execute("SELECT metrics FROM metrics WHERE run_name = ? ORDER BY id", [name]):
            yield from json.loads(row).items()


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def run(logger, folder, **environment):
    folders = {"WANDB_DIR": "", "TRACKIO_DIR": "trackio", "WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}
    own = {name: str(folder / below) for name, below in folders.items()}
    offline = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.logged", logger, str(folder)]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env={**os.environ, **own, **offline, **environment}, **options)
    assert done.returncode == 0, done.stderr


def values_of(logger, folder, name):
    """What a logger has of one run, by key in the order in which it came."""
    found = defaultdict(list)
    for key, value in LOGGERS[logger](folder, name):
        found[key].append(value)
    return found


@pytest.fixture(scope="module", params=["tensorboard", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in LOGGERS
                                                         if n != "tensorboard")])  # fmt: skip
def logged(request, tmp_path_factory):
    """The folder of a logger's runs, and what it has stored of the stock run and of the enabled one."""
    pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    run(request.param, folder)
    return folder, *(values_of(request.param, folder, name) for name in NAMES)


def test_losses_are_those_of_the_stock_run(logged):
    stock, enabled = map(comparable, logged[1:])
    assert set(enabled) == set(stock)
    compared = {"train/loss", "eval/loss", "train/grad_norm", "train/learning_rate", "train/epoch"}
    assert compared <= set(stock)
    assert len(stock["train/loss"]) == 4
    for key in compared:
        assert enabled[key] == pytest.approx(stock[key], rel=1e-5), key


def test_the_columns_are_there_and_are_those_of_the_trainer(logged):
    """Finite numbers all; what was shared has no gaps once something was."""
    folder, stock, values = logged
    assert not [key for key in stock if "autopack" in key]
    assert all(type(value) in (int, float) and math.isfinite(value) for each in values.values() for value in each)
    steps = [entry for entry in json.loads((folder / "enabled.json").read_text()) if "loss" in entry]
    for name in COLUMNS - {"shared"}:
        assert values[f"train/autopack/{name}"] == pytest.approx([e[f"autopack/{name}"] for e in steps], rel=1e-6)
    counts = {key: len(each) for key, each in values.items() if "autopack/" in key}
    times = {"train/": 4, "train/train_": 1, "eval/": 2}
    assert counts == {f"{prefix}autopack/{name}": number for prefix, number in times.items() for name in COLUMNS}
    shared = values["train/autopack/shared"]
    assert [value > 0 for value in shared] == [True, False, False, True]
    assert shared[1:3] == [0, 0]


@pytest.mark.exhaustive
def test_a_watched_model_is_recorded_and_a_twin_of_it_is_not(tmp_path):
    pytest.importorskip("wandb")
    run("wandb", tmp_path, WANDB_WATCH="all")
    stock, enabled = (values_of("wandb", tmp_path, name) for name in NAMES)
    assert enabled["train/loss"] == pytest.approx(stock["train/loss"], rel=1e-5)
    # Every hundredth call is recorded: a few steps are none, and a twin's hundred calls would be one.
    assert not [key for values in (stock, enabled) for key in values if "parameters/" in key]
    assert enabled["train/autopack/padding_skipped"][0] > 0

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.logged import NAMES

ROOT = Path(__file__).parents[2]
COLUMNS = {"fill", "padding_skipped", "documents_per_row", "real_tokens_per_second", "shared"}
_RUN_TIME = ("runtime", "per_second")


@dataclass
class Stored:
    """What a logger has of one run: values by key in their order, its summary and its configuration."""

    values: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def comparable(self):
        """Values of Trainer itself that do not depend on the clock."""
        return {k: v for k, v in self.values.items() if "autopack/" not in k and not k.endswith(_RUN_TIME)}


def tensorboard(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = Stored()
    for file in sorted((folder / f"tensorboard-{name}").iterdir()):
        events = EventAccumulator(str(file)).Reload()
        for key in events.Tags()["scalars"]:
            found.values[key] += [event.value for event in events.Scalars(key)]
    return found


def wandb(folder, name):
    from wandb.proto.wandb_internal_pb2 import Record

    for file in folder.glob("wandb/offline-run-*/run-*.wandb"):
        found, is_it = Stored(), False
        for raw in _wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(raw)
            is_it |= record.run.display_name == name
            for item in record.history.item:
                found.values[_key(item)].append(json.loads(item.value_json))
            found.summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
            for config in (record.config, record.run.config):
                found.config |= {_key(item): json.loads(item.value_json) for item in config.update}
        if is_it:
            return found
    raise AssertionError(f"no run {name} in {folder}")


def _key(item):
    return item.key or "/".join(item.nested_key)


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
    found = Stored()
    with sqlite3.connect(next(folder.glob("trackio/*.db"))) as database:
        for (row,) in database.execute("SELECT metrics FROM metrics WHERE run_name = ? ORDER BY id", [name]):
            for key, value in json.loads(row).items():
                found.values[key].append(value)
        for (row,) in database.execute("SELECT config FROM configs WHERE run_name = ?", [name]):
            found.config |= json.loads(row)
    return found


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def run(logger, folder, **environment):
    folders = {"WANDB_DIR": "", "TRACKIO_DIR": "trackio", "WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}
    own = {name: str(folder / below) for name, below in folders.items()}
    offline = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.logged", logger, str(folder)]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env={**os.environ, **own, **offline, **environment}, **options)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["tensorboard", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in LOGGERS
                                                         if n != "tensorboard")])  # fmt: skip
def logged(request, tmp_path_factory):
    """The name of a logger, the folder of its runs, and what it has stored of the stock run and of the enabled one."""
    pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    run(request.param, folder)
    return request.param, folder, {name: LOGGERS[request.param](folder, name) for name in NAMES}


def test_losses_are_those_of_the_stock_run(logged):
    stock, enabled = (logged[2][name].comparable() for name in NAMES)
    assert set(enabled) == set(stock)
    compared = {"train/loss", "eval/loss", "train/grad_norm", "train/learning_rate", "train/epoch"}
    assert compared <= set(stock)
    assert len(stock["train/loss"]) == 4
    for key in compared:
        assert enabled[key] == pytest.approx(stock[key], rel=1e-5), key


def test_the_columns_are_there_and_are_those_of_the_trainer(logged):
    """Finite numbers all; what was shared has no gaps once something was."""
    _, folder, stored = logged
    assert not [key for key in stored["stock"].values if "autopack" in key]
    values = stored["enabled"].values
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


def test_the_configuration_is_that_of_the_stock_run(logged):
    name, folder, stored = logged
    if name == "tensorboard":
        pytest.skip("TensorBoard stores it as text, of arguments and configuration alone")
    stock, enabled = (json.dumps(stored[each].config, sort_keys=True, default=str) for each in NAMES)
    assert "autopack" not in enabled.replace(str(folder), "")
    assert set(stored["stock"].config) == set(stored["enabled"].config)
    assert len(stored["enabled"].config) > 100
    assert "hidden_size" in stock


@pytest.mark.exhaustive
def test_the_summary_of_weights_and_biases_has_the_last_of_each(tmp_path):
    pytest.importorskip("wandb")
    run("wandb", tmp_path)
    stored = wandb(tmp_path, "enabled")
    for key, values in stored.values.items():
        if "autopack/" in key:
            assert stored.summary[key] == values[-1], key
    assert {f"train/train_autopack/{name}" for name in COLUMNS} <= set(stored.summary)
    assert stored.summary["train_loss"] == pytest.approx(wandb(tmp_path, "stock").summary["train_loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_a_watched_model_is_recorded_and_a_twin_of_it_is_not(tmp_path):
    pytest.importorskip("wandb")
    run("wandb", tmp_path, WANDB_WATCH="all")
    stock, enabled = (wandb(tmp_path, name) for name in NAMES)
    assert enabled.values["train/loss"] == pytest.approx(stock.values["train/loss"], rel=1e-5)
    # Every hundredth call is recorded: a few steps are none, and a twin's hundred calls would be one.
    assert not [key for key in stock.values if "parameters/" in key]
    assert not [key for key in enabled.values if "parameters/" in key]
    assert enabled.values["train/autopack/padding_skipped"][0] > 0

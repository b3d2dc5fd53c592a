"""Whoever packs is killed (SIGKILL) in the middle, and goes on: nothing is lost, nothing is there
twice.

Real processes: jobs of an array on one folder, and Ray with two workers. A process that is to be
killed waits at a known place for its end; others are killed wherever they happen to be."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest

import autopack
from autopack.packing import shard_files
from tests.packing.batches import documents_of
from tests.packing.engines import load, visible
from tests.packing.killed import MAX_LENGTH, STAGES
from tests.support.processes import ROOT
from tests.support.refusals import refused

COUNT = 4
PATIENCE = 600
"""Seconds after which a process that does not come is an error; nothing is timed."""


@pytest.fixture
def corpus(tmp_path):
    """Documents on disk, each of tokens that no other has."""
    lengths = np.random.default_rng(0).integers(1, 30, 120).tolist()
    made = datasets.Dataset.from_list(
        [{"input_ids": [1000 * i + t for t in range(n)]} for i, n in enumerate(lengths)]
    )
    made.save_to_disk(tmp_path / "corpus")
    return made


@pytest.fixture
def start(tmp_path):
    """Starts a program of killed.py in a session of its own; what is left of it ends with the
    test."""
    started = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(*arguments):
        command = [sys.executable, "-m", "tests.packing.killed", *map(str, arguments)]
        with (tmp_path / f"said-{len(started)}").open("w") as said:
            started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(holds, *processes):
    """Wait for what processes do; an error where one of them ends before."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it does not come"
        assert all(process.poll() is None for process in processes), "a process has ended before"
        time.sleep(0.01)


def finish(*processes):
    assert [process.wait(PATIENCE) for process in processes] == [0] * len(processes)


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL


def pid_at(flag):
    return int(flag.read_text())


def name_of(shard):
    return f"rows-{shard:05d}-of-{COUNT:05d}.parquet"


def bytes_of(folder):
    return {Path(file).name: Path(file).read_bytes() for file in shard_files(folder)}


def check(folder, corpus):
    """The shards have every document once, in the rows of `pack`."""
    rows = load(shard_files(folder))
    assert sorted(documents_of(rows)) == sorted(corpus["input_ids"])
    assert rows[:] == autopack.pack(corpus, MAX_LENGTH)[:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_a_job_of_an_array_is_killed_and_run_again(stage, corpus, start, tmp_path):
    folder, victim = tmp_path / "rows", 2
    killed = start("job", victim, COUNT, folder, stage)
    until((tmp_path / f"at-{name_of(victim)}").exists, killed)
    others = [start("job", shard, COUNT, folder) for shard in range(COUNT) if shard != victim]
    finish(*others)  # beside one that is in the middle of its file
    kill(killed)
    assert visible(folder) == [
        name_of(shard) for shard in range(COUNT) if shard != victim or stage == "named"
    ]
    left = {*os.listdir(folder)} - {*visible(folder)}
    assert len(left) == (stage in ("within", "whole"))
    if stage != "named":
        with refused(
            "bad-file", match=f"found no '{name_of(victim)}'; 1 of {COUNT} shards are missing"
        ):
            shard_files(folder)
    finish(*(start("job", shard, COUNT, folder) for shard in range(COUNT)))  # the whole array again
    check(folder, corpus)
    assert {*os.listdir(folder)} - {*visible(folder)} == left  # nobody reads it


@pytest.mark.exhaustive
def test_a_job_that_was_given_up_and_still_runs_does_no_harm(corpus, start, tmp_path):
    folder = tmp_path / "rows"
    slow = start("job", 1, COUNT, folder, "whole")
    until((tmp_path / f"at-{name_of(1)}").exists, slow)
    finish(*(start("job", shard, COUNT, folder) for shard in range(COUNT)))
    before = bytes_of(folder)
    (tmp_path / "go").touch()
    finish(slow)
    assert sorted(os.listdir(folder)) == sorted(before)
    check(folder, corpus)
    assert bytes_of(folder) == before


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


@needs_ray
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_of_ray_is_killed(stage, corpus, start, tmp_path):
    folder = tmp_path / "rows"
    driver = start("ray", 0, COUNT, folder, stage)
    for number in range(2):  # two shards, each at whichever worker has it
        until(lambda number=number: len(list(tmp_path.glob("at-*"))) > number, driver)
        flag = sorted(tmp_path.glob("at-*"), key=lambda path: path.stat().st_mtime)[number]
        os.kill(pid_at(flag), signal.SIGKILL)
    (tmp_path / "go").touch()
    finish(driver)
    check(folder, corpus)

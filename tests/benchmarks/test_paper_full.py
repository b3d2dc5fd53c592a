"""`benchmarks.paper --full`: a trial of the whole, goes on where it stopped, and refuses what is of other settings."""

import json

import numpy as np
import pytest

from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import paper, paper_table, paper_training
from benchmarks.paper_arms import ARMS, FIXED, MINI_BATCH, OFFLINE, PADDING, Shape
from tests.benchmarks.test_paper import command

TRIAL = ["--full", "--trial", "--data", "flan", "--threads", "1"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """What a trial of the command wrote, begun by a call that had no time and ended by another one."""
    path = tmp_path_factory.mktemp("full") / "full.json"
    command(path, TRIAL)
    return path


def test_everything_is_measured_and_checked(record):
    found = json.loads(record.read_text())
    data = found["data"]["flan"]
    assert set(data["arms"]) == set(data["rounds"][0]) == set(ARMS)
    assert all(passed for passed, _ in found["checks"])
    assert [line for _, line in found["checks"] if "in each of 3 steps the loss of MiniBatch" in line]
    for arm, of in data["rounds"][0].items():
        assert of["wall"] > 0, arm
        assert data["arms"][arm]["peak bytes"] > 0
    text = record.with_suffix(".txt").read_text()
    assert all(text.count(f"\n{arm:<22}") == 3 for arm in ARMS)


def test_what_is_missing_alone_is_measured(record, tmp_path, monkeypatch):
    """And nothing else is, neither the other arms nor their rounds."""
    found, trained = json.loads(record.read_text()), []
    del found["data"]["flan"]["trained"][FIXED]
    path = tmp_path / "part.json"
    path.write_text(json.dumps(found))
    real = paper_training.train
    monkeypatch.setattr(paper, "train", lambda way, *rest: trained.append(way) or real(way, *rest))
    paper.main([*TRIAL, "--json", str(path)])
    assert trained == [ARMS[FIXED]]
    before, again = (each["data"]["flan"] for each in (found, json.loads(path.read_text())))
    assert again["rounds"] == before["rounds"]
    assert again["arms"][FIXED]["losses"] == pytest.approx(before["arms"][FIXED]["losses"], abs=1e-5)


@pytest.mark.parametrize(("name", "was", "wanted"), [("documents", 12, 16), ("seed", 0, 1)])
def test_other_settings_are_refused(record, name, was, wanted):
    before = record.read_bytes()
    with pytest.raises(ValueError, match=f"its {name} is {was}, wanted {wanted}"):
        paper.main([*TRIAL, f"--{name}", str(wanted), "--json", str(record)])
    assert record.read_bytes() == before


def test_a_loss_that_differs_in_one_step_fails(record):
    found = json.loads(record.read_text())
    assert [passed for passed, _ in paper_table.step_by_step(found)] == [True]
    found["data"]["flan"]["arms"][MINI_BATCH]["losses"][1] += 6e-4
    ((passed, line),) = paper_table.step_by_step(found)
    assert not passed
    assert "6.0e-04 at most" in line


@pytest.mark.parametrize("arm", ARMS)
def test_columns_that_are_counted_are_those_of_the_calls(arm):
    shape = Shape(4, 128)
    lengths = draw(DISTRIBUTIONS["flan"], 40, 128, 0, scale=8)
    documents = [np.ones(length, np.int64) for length in lengths]
    *full, _ = ARMS[arm].choose(lengths, shape, 0)
    for pieces in full:
        call = ARMS[arm].collate(documents, pieces, shape)
        assert paper_table.columns_of(arm, pieces) == call["input_ids"].numel()


def test_devices_wait_for_the_largest_mini_batch():
    options = paper.parse(["--full", "--trial", "--scale", "1", "--max-length", "4096"])
    found = paper_table.waits("flan", options)
    assert found[PADDING]["columns"] == pytest.approx(2.1, rel=0.1)
    assert found[MINI_BATCH]["columns"] == found[FIXED]["columns"] == 1
    assert found[FIXED]["largest over mean"] == 1
    assert found[OFFLINE]["largest over mean"] < 1.05 < 1.5 < found[MINI_BATCH]["largest over mean"]
    data = {"arms": {arm: {"speed": [1.0, 2.0, 3.0]} for arm in ARMS}, "waits": found}
    assert paper_table.in_step(data, FIXED) == pytest.approx(2 * found[PADDING]["largest over mean"])

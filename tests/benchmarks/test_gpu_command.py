"""`python -m benchmarks.gpu` on a CPU: every part on stand-ins, parts that fail, budgets, what is
left out."""

import json
import sys

import pytest
import torch

from autopack.inspection import torches
from benchmarks.gpu import parts, speed
from benchmarks.gpu import run as run_module
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.job import Part
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.processes import run_bounded
from benchmarks.gpu.run import Run
from tests.support.processes import python

pytestmark = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")


def _raise(job):
    job.record(before="it was recorded")
    raise ZeroDivisionError("a part that raises")


SMALL = ("--device", "cpu", "--small", "--minutes", "120")
"""A tiny run, with limits that a busy machine keeps."""


def _run(folder, *arguments):
    status = main(["--out", str(folder), *SMALL, *arguments])
    return status, json.loads((folder / "gpu.json").read_text()), (folder / "gpu.txt").read_text()


@pytest.mark.exhaustive
def test_every_part_runs_on_stand_ins_and_one_that_raises_is_named(tmp_path, monkeypatch, capsys):
    first, *others = parts.PARTS
    monkeypatch.setattr(parts, "PARTS", [first, Part("raises", _raise, 0.1), *others])
    status, result, table = _run(tmp_path)
    found = result["parts"]
    assert status == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: raises. ")
    assert "in _raise" in "\n".join(found["raises"]["error"]["traceback"])
    assert found["raises"]["result"] == {"before": "it was recorded"}
    left_out = dict.fromkeys(
        (
            "speed, 1B",
            "speed, 1B, autocast",
            "speed, 7B, autocast",
            "speed, qwen3_next",
            "paper, 7B",
        ),
        "left out",
    )
    not_ok = {
        name: outcome["status"] for name, outcome in found.items() if outcome["status"] != "ok"
    }
    assert not_ok == {"raises": "failed"} | left_out, table

    def result_of(name):
        return found[name]["result"]

    for size, batches in (("0.1B", 4), ("0.1B, autocast", 4), ("7B", 2)):
        measured = result_of(f"speed, {size}")
        for timed in (measured["forward"], measured["step"]):
            assert timed["rounds"] >= 1
            for cell in timed["arms"].values():
                assert cell["tokens_per_second"]["median"] > 0
                assert cell["speed of stock packed flash"]["median"] > 0
                assert cell["peak_bytes"] > 0
            assert (
                f"{batches} padded batches packed inside"
                in timed["arms"]["enabled, padded batch"]["note"]
            )
        errors = measured["checked"]
        assert (
            max(errors["arms"].values())
            <= errors["bound"]
            < errors["control: documents that see each other"]
        )
    assert "padding" in "\n".join(result_of("paper, 1B")["output"])


_KILLED = """
import os, sys
from benchmarks.gpu import parts
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.job import Part

def dies(job):
    job.record(half="of it")
    os.kill(os.getpid(), 9)

parts.PARTS = [parts.PARTS[0], Part("dies in the middle", dies, 0.1), *parts.PARTS[1:]]
main(sys.argv[1:])
"""


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    asked = ["--parts", "environment", "dies in the middle", "live checks"]
    python("-c", _KILLED, "--out", tmp_path, *SMALL, *asked, status=-9)
    left = tmp_path / "dies-in-the-middle.unfinished.json"
    assert json.loads(left.read_text())["result"] == {"half": "of it"}
    before = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: part["status"] for name, part in before.items()} == {"environment": "ok"}

    first, *others = parts.PARTS
    lives = Part("dies in the middle", lambda job: {"whole": True}, 0.1)
    monkeypatch.setattr(parts, "PARTS", [first, lives, *others])
    status, result, table = _run(tmp_path, *asked)
    assert status == 0, table
    assert "environment: finished by an earlier run" in capsys.readouterr().out
    assert result["parts"]["environment"] == before["environment"]
    assert result["parts"]["dies in the middle"]["result"] == {"whole": True}
    assert [part["status"] for part in result["parts"].values()] == ["ok"] * 3
    assert not left.exists()

    for changed in ({"seed": 1}, {"small": False}):
        again = Run(Machine("cpu"), tmp_path, 1, **{"small": True, **changed})
        assert not again.kept
        assert "written anew" in capsys.readouterr().out
    monkeypatch.setattr(run_module, "_digest", lambda: "another")
    assert not Run(Machine("cpu"), tmp_path, 1, small=True).kept


def test_what_there_was_no_time_for_is_left_out_named_and_comes_next(tmp_path, capsys):
    status, result, table = _run(tmp_path, "--minutes", "0")
    left = [(part["status"], part["reason"]) for part in result["parts"].values()]
    assert (status, left) == (0, [("left out", "no time")] * len(parts.PARTS))
    assert table.count("left out: no time") == len(parts.PARTS)
    assert capsys.readouterr().out.splitlines()[-1].startswith("LEFT: environment; ")
    status, result, _ = _run(tmp_path, "--parts", "environment")
    assert (status, result["parts"]["environment"]["status"]) == (0, "ok")


def test_only_a_gpu_is_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        main(["--out", "nowhere"])
    assert ended.value.code == 2
    assert "--device cpu --small" in capsys.readouterr().err


def test_what_a_process_leaves_behind_does_not_hold_the_run_up():
    child = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)'])"
    )
    assert run_bounded([sys.executable, "-c", f"{child}; print('done')"], 30) == (0, ["done"])
    status, lines = run_bounded(
        [sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(60)"], 1
    )
    assert status is None
    assert lines in ([], ["so far"])


def test_sizes_are_what_they_are_called_and_are_made_on_their_device():
    for name, billions in (("0.1B", 0.134), ("1B", 1.1), ("7B", 6.74)):
        size = speed.SIZES[name]
        model = speed.build(size, "meta", 0)
        found = sum(parameter.numel() for parameter in model.parameters())
        assert found == pytest.approx(billions * 1e9, rel=0.01)
        assert {str(t.device) for t in [*model.parameters(), *model.buffers()]} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

"""`python -m benchmarks.gpu` on a CPU: every part on stand-ins, parts that fail, budgets, what is left out."""

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from autopack import tiny
from autopack.bench.contest import ROW, Arm
from autopack.inspection import torches
from benchmarks.gpu import exactness, parts, report, speed
from benchmarks.gpu import run as run_module
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.arms import FLASH
from benchmarks.gpu.job import Job, Part, carry_out
from benchmarks.gpu.machine import ROOT, Machine
from benchmarks.gpu.processes import run_bounded
from benchmarks.gpu.run import Run
from compat import torch_flash
from compat.standins import supported_implementations
from tests.bench.test_bench import one_by_one

pytestmark = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")


def _raise(job):
    job.record(before="it was recorded")
    raise ZeroDivisionError("a part that raises")


def _carried_out(measure):
    return carry_out(Part("measured", measure, 1), Job(Machine("cpu"), True, 60))


def _run(folder, *arguments):
    status = main(["--out", str(folder), "--device", "cpu", "--small", *arguments])
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
        ("speed, 1B", "speed, 1B, autocast", "speed, 7B, autocast", "speed, qwen3_next", "paper, 7B"), "left out"
    )
    not_ok = {name: outcome["status"] for name, outcome in found.items() if outcome["status"] != "ok"}
    assert not_ok == {"raises": "failed"} | left_out, table

    def result_of(name):
        return found[name]["result"]

    for name in ("varlen", "flash", "flex"):
        cells = result_of(f"exactness, {name}")["types"]
        assert cells
        assert all(cell["packed"] < 0.1 < cell["stock leaks"] for cell in cells.values())
    mixers = result_of("mixers")
    assert mixers["types"]["qwen3_next fp32"]["kernels"]["torch_chunk_gated_delta_rule"] is True
    bounds = [bounds for kernel, bounds in mixers["documents at kernels"]]
    assert any(bounds and len(bounds) > 1 for bounds in bounds), "documents must have reached the kernels"
    for size, batches in (("0.1B", 4), ("0.1B, autocast", 4), ("7B", 2)):
        measured = result_of(f"speed, {size}")
        for timed in (measured["forward"], measured["step"]):
            assert timed["rounds"] >= 1
            for cell in timed["arms"].values():
                assert cell["tokens_per_second"]["median"] > 0
                assert cell["speed of stock packed flash"]["median"] > 0
                assert cell["peak_bytes"] > 0
            assert f"{batches} padded batches packed inside" in timed["arms"]["enabled, padded batch"]["note"]
        errors = measured["checked"]
        assert max(errors["arms"].values()) <= errors["bound"] < errors["control: documents that see each other"]
    assert all(arm in table for arm in result_of("waits")["calls"])
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
    asked = ["--parts", "environment", "dies in the middle", "waits"]
    command = [sys.executable, "-c", _KILLED, "--out", str(tmp_path), "--device", "cpu", "--small", *asked]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -9
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
    monkeypatch.setattr(run_module, "code_digest", lambda *more: "another")
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
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    assert run_bounded([sys.executable, "-c", f"{child}; print('done')"], 30) == (0, ["done"])
    status, lines = run_bounded([sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(60)"], 1)
    assert status is None
    assert lines in ([], ["so far"])


def test_what_is_no_json_does_not_end_the_run(tmp_path):
    run = Run(Machine("cpu"), tmp_path, 1, small=True)
    odd = {"dtype": torch.float16, "error": float("nan"), "types": "none"}
    run.go([Part("odd", lambda job: odd, 1)])
    assert run.failed() == []
    assert "cannot be shown" in (tmp_path / "gpu.txt").read_text()
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["odd"]["result"]["dtype"] == "torch.float16"


def test_a_part_whose_process_dies_keeps_what_it_had_recorded(tmp_path, monkeypatch):
    run = Run(Machine("cpu"), tmp_path, 1, small=True, apart=True)
    outcome = tmp_path / "outcome.json"
    Job(run.machine, True, 10, path=outcome).record(types={"llama bf16": {"packed": 0.0}})
    monkeypatch.setattr(sys, "executable", "false")
    found = run._in_process(Part("mixers", _raise, 1), 10, outcome)
    assert found["status"] == "failed"
    assert found["error"]["message"] == "its process ended with status 1"
    assert found["result"] == {"types": {"llama bf16": {"packed": 0.0}}}
    assert "its process ended with status 1" in report.line("mixers", found)


def test_an_arm_without_memory_is_recorded_and_the_others_go_on(monkeypatch):
    enabled = next(arm for arm in speed.ARMS if arm.name == "enabled")
    arms = (speed.ARMS[0], Arm("greedy", ROW, False, one_by_one(0)), FLASH, enabled)
    monkeypatch.setattr(speed, "ARMS", arms)
    outcome = _carried_out(lambda job: speed.measure_size(job, "7B"))
    assert outcome["status"] == "ok", outcome
    for kind in ("forward", "step"):
        race = outcome["result"][kind]["arms"]
        assert (race["greedy"]["failed"], race["greedy"]["tokens_per_second"]) == ("out of memory", None)
        assert all(race[arm.name]["tokens_per_second"] for arm in (arms[0], arms[3]))
    said = [line for line in report._section("speed", outcome["result"]) if line.startswith("greedy")]
    assert len(said) == 2
    assert all("out of memory" in line for line in said)


def test_a_size_that_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(Machine, "free", lambda self: 9.0)
    part = next(part for part in parts.PARTS if part.name == "speed, 7B")
    outcome = carry_out(part, Job(Machine("cpu"), False, 60))
    assert outcome["status"] == "left out"
    assert outcome["reason"] == "needs 18 GiB of memory, and 9 are free"


def test_kernels_that_leak_are_found(monkeypatch):
    def everything(query, key, bounds_q, bounds_k, scale, causal, window, softcap=0.0):
        one = torch.tensor([0, len(query)], dtype=torch.int32)
        return within(query, key, one, one, scale, causal, window, softcap)

    within = torch_flash.scores_within
    monkeypatch.setattr(torch_flash, "scores_within", everything)
    monkeypatch.setattr(exactness, "SMALL", {"varlen": ["llama"]})
    outcome = _carried_out(lambda job: exactness.measure_backend(job, "varlen"))
    assert outcome["status"] == "failed"
    assert [problem.split(": ")[0] for problem in outcome["problems"]] == ["llama bf16", "llama fp16"]
    assert "packed is" in outcome["problems"][0]
    assert "influence is" in outcome["problems"][0]


@pytest.mark.parametrize("backend", exactness.TYPES)
def test_types_declare_their_backend_and_fit_its_kernels(backend):
    types = exactness.TYPES[backend]
    assert len(set(types)) == 12
    for model_type in types:
        model = tiny.build(model_type)
        declared = supported_implementations(model)
        if backend == "flex":
            config = model.config
            assert "flex_attention" in declared, model_type
            assert (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) >= 16
        else:
            assert "flash_attention" in declared or (backend == "varlen" and "sdpa" in declared), model_type


def test_sizes_are_what_they_are_called_and_are_made_on_their_device():
    for name, billions in (("0.1B", 0.134), ("1B", 1.1), ("7B", 6.74)):
        size = speed.SIZES[name]
        model = speed.build(size, "meta", 0)
        found = sum(parameter.numel() for parameter in model.parameters())
        assert found == pytest.approx(billions * 1e9, rel=0.01)
        assert {str(t.device) for t in [*model.parameters(), *model.buffers()]} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.fixture
def cuda(monkeypatch):
    """A GPU as far as the functions of torch go that the machine calls; torch has to have each of them."""
    state = SimpleNamespace(mode=0)

    def set_mode(mode):
        state.mode = {"default": 0, "warn": 1}.get(mode, mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature: not all synchronizing operations", stacklevel=2
        )

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return state


def test_waits_are_counted_by_line_and_the_mode_is_given_back(cuda):
    def call():
        assert cuda.mode == 1
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    found = Machine("cuda").waits(call)
    assert list(found.values()) == [3]
    assert next(iter(found)).startswith("tests/benchmarks/test_gpu_command.py:")
    assert cuda.mode == 0
    with pytest.raises(ZeroDivisionError):
        Machine("cuda").waits(lambda: 1 / 0)
    assert cuda.mode == 0

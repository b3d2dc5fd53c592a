"""`python -m benchmarks.gpu` on a CPU: every part on stand-ins, failures, budgets, arguments against torch's own."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from autopack import tiny
from autopack.attention.backends.varlen import attend_varlen
from autopack.inspection import releases, torches
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from benchmarks.gpu import exactness, parts, report, speed, suite
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.arms import ROW, Arm, Batch
from benchmarks.gpu.job import Job, Part, carry_out
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.processes import run_bounded
from benchmarks.gpu.run import Run
from compat import torch_flash
from compat.standins import set_implementation
from tests.gpu import test_models, test_varlen

pytestmark = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")
LAYOUT = PackedLayout.from_lengths([[5, 1, 9], [8, 7]])


def _raise(job: Job) -> None:
    job.record(before="it was recorded")
    raise ZeroDivisionError("a part that raises")


def _run(folder, *arguments):
    status = main(["--out", str(folder), "--device", "cpu", "--small", *arguments])
    return status, json.loads((folder / "gpu.json").read_text()), (folder / "gpu.txt").read_text()


def test_every_part_runs_on_stand_ins_and_one_that_raises_is_named(tmp_path, monkeypatch, capsys):
    first, *others = parts.PARTS
    monkeypatch.setattr(parts, "PARTS", [first, Part("raises", _raise, 0.1), *others])
    status, result, table = _run(tmp_path)
    found = result["parts"]
    assert status == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: raises. ")
    error = found["raises"].pop("error")
    assert (error["type"], error["message"]) == ("ZeroDivisionError", "a part that raises")
    assert "in _raise" in "\n".join(error["traceback"])
    assert found["raises"]["result"] == {"before": "it was recorded"}
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        "environment": "ok", "raises": "failed", "exactness, varlen": "ok", "exactness, flash": "ok", "waits": "ok",
        "speed, 0.1B": "ok", "speed, 1B": "left out", "speed, 7B": "ok", "exactness, flex": "ok", "tests": "ok",
        "mixers": "ok",
    }, table  # fmt: skip
    for name in ("varlen", "flash", "flex"):
        cells = found[f"exactness, {name}"]["result"]["types"]
        assert cells
        assert all(cell["packed"] < 0.1 < cell["stock leaks"] for cell in cells.values())
    assert found["mixers"]["result"]["types"]["qwen3_next fp32"]["kernels"]["torch_chunk_gated_delta_rule"] is True
    bounds = [bounds for kernel, bounds in found["mixers"]["result"]["documents at kernels"]]
    assert any(bounds and len(bounds) > 1 for bounds in bounds), "documents must have reached the kernels"
    if not torch.cuda.is_available():
        assert found["tests"]["result"]["counts"].keys() == {"SKIPPED"}
    for size in ("speed, 0.1B", "speed, 7B"):
        for kind in ("forward", "step"):
            race = found[size]["result"][kind]
            assert race["rounds"] >= 1
            assert all(cell["real tokens/s"] > 0 for cell in race["arms"].values())
            assert race["speed of stock packed flash"].keys() == race["arms"].keys()
            told = race["arms"]["enabled, padded batch"]["enabled"]["padded batches"]
            assert told.startswith("2 padded batches packed inside")
        errors = found[size]["result"]["checked"]
        assert max(errors["arms"].values()) <= errors["bound"] < errors["control: documents that see each other"]
    assert "FAILED: raises" in table
    assert "No part failed" not in table
    assert all(arm in table for arm in found["waits"]["result"]["calls"])
    assert result["picture"] == "gpu.png"
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} <= {"gpu.json", "gpu.txt", "gpu.png"}


def test_without_matplotlib_there_is_no_picture_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    race = {"arms": {"padded": {"median s": 1.0, "real tokens/s": 5.0}}}
    result = {"parts": {"speed, 1B": {"result": {"step": race}}}, "settings": {"device": "cpu"}}
    assert "matplotlib" in report.draw(result, tmp_path / "gpu.png")
    assert not list(tmp_path.iterdir())


def test_without_time_everything_is_left_out_and_written(tmp_path):
    status, result, table = _run(tmp_path, "--minutes", "0")
    assert status == 0
    assert [(part["status"], part["reason"]) for part in result["parts"].values()] == [("left out", "no time")] * 10
    assert table.count("left out: no time") == 10
    assert result["picture"] == "none, because nothing was timed"


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


@pytest.mark.parametrize("calls", [0, 8], ids=["at once", "in a round"])
def test_an_arm_without_memory_is_recorded_and_the_others_go_on(monkeypatch, calls):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    left = iter(range(calls))

    def no_memory(*args, **kwargs):
        if next(left, None) is None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB\nand so on")
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("no_memory", no_memory)
    AttentionMaskInterface.register("no_memory", lambda *_, **__: None)
    arms = (speed.ARMS[0], Arm("greedy", "no_memory", ROW, False), speed.ARMS[4])
    monkeypatch.setattr(speed, "ARMS", arms)
    part = Part("speed", lambda job: speed.measure_size(job, "7B"), 1)
    outcome = carry_out(part, Job(Machine("cpu"), True, 60))
    if calls:  # without documents it leaks, and is named
        assert [problem[:13] for problem in outcome["problems"]] == ["greedy is off"]
    else:
        assert outcome["status"] == "ok", outcome
    for kind in ("forward", "step"):
        race = outcome["result"][kind]["arms"]
        assert race["greedy"] == {"out of memory": "CUDA out of memory. Tried to allocate 7.00 GiB"}
        assert all("median s" in race[arm.name] for arm in (arms[0], arms[2]))
    said = [line for line in report._section("speed", outcome["result"]) if line.startswith("greedy")]
    assert len(said) == 2
    assert all("out of memory" in line for line in said)


def test_a_size_that_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(Machine, "free", lambda self: 9.0)
    outcome = carry_out(parts.PARTS[6], Job(Machine("cpu"), False, 60))
    assert outcome["status"] == "left out"
    assert outcome["reason"] == "needs 18 GiB of memory, and 9 are free"


def test_kernels_that_leak_are_found(monkeypatch):
    def everything(query, key, bounds_q, bounds_k, scale, causal, window, softcap=0.0):
        one = torch.tensor([0, len(query)], dtype=torch.int32)
        return within(query, key, one, one, scale, causal, window, softcap)

    within = torch_flash.scores_within
    monkeypatch.setattr(torch_flash, "scores_within", everything)
    monkeypatch.setattr(exactness, "SMALL", {"varlen": ["llama"]})
    outcome = carry_out(
        Part("exactness", lambda job: exactness.measure_backend(job, "varlen"), 1), Job(Machine("cpu"), True, 60)
    )
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
        declared = releases.supported_implementations(model)
        if backend == "flex":
            config = model.config
            assert "flex_attention" in declared, model_type
            assert (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) >= 16
        else:
            assert "flash_attention" in declared or (backend == "varlen" and "sdpa" in declared), model_type


def test_sizes_are_what_they_are_called_and_are_made_on_their_device():
    for name, billions in (("0.1B", 0.125), ("1B", 1.1), ("7B", 6.74)):
        size = speed.SIZES[name]
        model = speed.build(size, "meta", 0)
        found = sum(parameter.numel() for parameter in model.parameters())
        assert found == speed.parameters(size) == pytest.approx(billions * 1e9, rel=0.01)
        assert {str(t.device) for t in [*model.parameters(), *model.buffers()]} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def _states(dtype=torch.float16, size=16, value_size=16):
    generator = torch.Generator().manual_seed(0)

    def draw(heads, width):
        return torch.randn(2, heads, 15, width, generator=generator).to(dtype).requires_grad_()

    return draw(4, size), draw(2, size), draw(2, value_size)


def _alone(states, before, sinks):
    """Each document alone, in float32."""
    query, key, value = (t.float() for t in states)
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    rows = [[], []]
    for row, first, end in LAYOUT.spans:
        q, k, v = (t[row, :, first:end] for t in (query, key, value))
        distance = torch.arange(end - first)[:, None] - torch.arange(end - first)[None]
        hidden = (distance < 0) | (distance > before)
        scores = (q @ k.mT * 0.3).masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, end - first, 1)], dim=-1)
        rows[row].append((scores.softmax(-1)[..., : end - first] @ v).transpose(0, 1))
    return torch.stack([torch.cat(row) for row in rows])


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("sizes", [(16, 16), (12, 10)], ids=str)
def test_arguments_pass_torchs_own_dispatcher(sizes, sinks):
    """Through `varlen_attn` and the aten operators as they are; only what they compute on a GPU is stood in for."""
    states = _states(torch.float16, *sizes)
    sink = torch.linspace(-1, 2, 4).half().requires_grad_() if sinks else None
    inputs = [*states, sink] if sinks else list(states)
    with torch_flash.aten_on_cpu():
        found = attend_varlen(LAYOUT, *states, Pattern(causal=True, before=3), 0.3, sink)
        gradients = torch.autograd.grad(found.float().square().sum(), inputs)
    expected = _alone(states, 3, sink)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for f, w in zip((found, *gradients), (expected, *wanted), strict=True):
        # Roundings to 11 bits of inputs and outputs, in values of order 1 to 10.
        torch.testing.assert_close(f.float(), w.float(), atol=2e-2, rtol=2e-2)


def test_stand_ins_have_the_arguments_of_torchs_schemas():
    for name, function in (("forward", torch_flash.forward_on_cpu), ("backward", torch_flash.backward_on_cpu)):
        schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        parameters = inspect.signature(function).parameters.values()
        found = [(p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty) for p in parameters]
        wanted = [(a.name, a.kwarg_only, a.has_default_value()) for a in schema.arguments]
        # A later torch has more, all with defaults.
        assert [each for each in found if each[0] in {w[0] for w in wanted}] == wanted
        assert all(has_default for each, _, has_default in found if each not in {w[0] for w in wanted})


def test_varlen_attn_is_given_what_its_signature_and_kernel_take(monkeypatch):
    real, calls = torches.varlen_attn, []

    def spy(*args, **kwargs):
        calls.append(inspect.signature(real).bind(*args, **kwargs).arguments)
        return real(*args, **kwargs)

    spy.__signature__ = inspect.signature(real)
    monkeypatch.setattr(torches, "varlen_attn", spy)
    with torch_flash.aten_on_cpu():
        attend_varlen(LAYOUT, *_states(size=12, value_size=10), Pattern(causal=True), None)
        package = torch_flash._module()["flash_attn"]
        q, k, v = (t.transpose(1, 2).flatten(0, 1).detach() for t in _states(size=12, value_size=12))
        bounds = LAYOUT.cu_seqlens
        package.flash_attn_varlen_func(q, k, v, bounds, bounds, 9, 9, causal=True, window_size=(3, 3))
        package.flash_attn_func(*(t.unflatten(0, (2, 15)) for t in (q, k, v)))
    windows = [(-1, 0), (3, 0), (-1, -1)]
    assert len(calls) == 3
    for call, window in zip(calls, windows, strict=True):
        assert call["cu_seq_q"].dtype == call["cu_seq_k"].dtype == torch.int32
        assert type(call["max_q"]) is type(call["max_k"]) is int
        assert {call[name].shape[-1] for name in ("query", "key", "value")} == {16}, "a multiple of 8, the same for all"
        assert all(call[name].dim() == 3 and call[name].stride(-1) == 1 for name in ("query", "key", "value"))
        if "window_size" in call:
            assert (call["window_size"], call["enable_gqa"]) == (window, True)
            assert call["scale"] == pytest.approx(12**-0.5), "that of heads before they are padded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "fp16 and bf16"),
        ({"bounds": torch.tensor([0, 5, 15])}, "int32"),
        ({"bounds": torch.tensor([0, 5, 14], dtype=torch.int32)}, "are not 15 tokens"),
        ({"longest": 4}, "a maximum of 4"),
        ({"size": 12}, "multiples of 8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_stand_ins_refuse_what_kernels_refuse(change, message):
    given = {"dtype": torch.float16, "bounds": torch.tensor([0, 5, 15], dtype=torch.int32), "longest": 10, "size": 16}
    given |= change
    states = torch.randn(15, 2, given["size"]).to(given["dtype"])
    with torch_flash.aten_on_cpu(), pytest.raises(RuntimeError, match=message):
        torches.attend_varlen(states, states, states, given["bounds"], given["longest"], 0.3, (-1, 0))


def test_torchs_kernels_serve_stock_flash_on_padded_batches():
    """What the audits of `flash` compare padded batches with."""
    model = tiny.build("mistral", attn_implementation="sdpa", dtype=torch.float16)
    ids = tiny.tokens(model.config, 2, 12)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    set_implementation(model, "flash_attention_2")
    with torch_flash.aten_on_cpu(), torch_flash.torch_kernels_as_flash_attn():
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[0], expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1, :7], expected[1, :7], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "case", [("varlen", "eager", "gpt_oss"), ("flash", "flash_attention_2", "mistral")], ids=lambda case: case[0]
)
def test_tests_of_models_pass_on_stand_ins(monkeypatch, case):
    assert case in test_models.CASES
    monkeypatch.setattr(test_models, "DEVICE", "cpu")
    monkeypatch.setattr(test_models, "LONG", (5, 12, 1, 9))
    with torch_flash.aten_on_cpu():
        test_models.test_packed_equals_alone(*case, torch.float16)


def test_tests_of_kernels_pass_on_stand_ins(monkeypatch):
    monkeypatch.setattr(test_varlen, "DEVICE", "cpu")
    monkeypatch.setattr(test_varlen, "ROWS", [[7, 60, 1, 12, 30], [50, 40, 20]])
    patterns = test_varlen.PATTERNS
    with torch_flash.aten_on_cpu():
        for pattern in patterns.values():
            test_varlen.test_equals_each_document_alone(pattern, torch.float16)
        test_varlen.test_equals_each_document_alone(patterns["causal"], torch.bfloat16)
        test_varlen.test_head_sizes_of_query_and_value_may_differ((16, 12), torch.float16)
        test_varlen.test_sinks_take_part_in_output_and_gradients(patterns["window"], torch.float16)
        test_varlen.test_without_the_sinks_the_same_test_fails(torch.float16)
        test_varlen.test_one_document_does_not_move_another(torch.float16)


class _Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, end):
        return 250.0


@pytest.fixture
def cuda(monkeypatch):
    """A GPU as far as the functions of torch go that the machine calls; torch has to have each of them."""
    state = SimpleNamespace(mode=0, waits=0)

    def synchronize():
        state.waits += 1

    def set_mode(mode):
        state.mode = {"default": 0, "warn": 1}.get(mode, mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature: not all synchronizing operations", stacklevel=2
        )

    for name, function in {
        "synchronize": synchronize, "get_sync_debug_mode": lambda: state.mode, "set_sync_debug_mode": set_mode,
        "Event": _Event, "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 2**30,
        "max_memory_allocated": lambda: 3 * 2**30, "empty_cache": lambda: None, "mem_get_info": lambda: (2**31, 2**32),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, function)
    return state


def test_waits_are_counted_by_line_and_the_mode_is_given_back(cuda):
    def call():
        assert cuda.mode == 1
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    found = Machine("cuda").waits(call)
    assert list(found.values()) == [3]
    assert next(iter(found)).startswith("tests/test_gpu_command.py:")
    assert cuda.mode == 0
    with pytest.raises(ZeroDivisionError):
        Machine("cuda").waits(lambda: 1 / 0)
    assert cuda.mode == 0


def test_times_and_memory_are_taken_around_a_call_that_is_waited_for(cuda):
    found = Machine("cuda").timed(lambda: None)
    assert found["events"] == 0.25
    assert cuda.waits == 2
    assert Machine("cuda:0").peak(lambda: None) == {"before": 1.0, "peak": 3.0}
    assert Machine("cuda").free() == 2.0


def test_a_gpu_is_described(cuda, monkeypatch):
    shown = SimpleNamespace(name="Some GPU", multi_processor_count=132, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shown)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = Machine("cuda").about()
    assert (found["name"], found["capability"], found["memory, GiB"], found["free, GiB"]) == ("Some GPU", "9.0", 80, 2)
    assert found["torch"] == torch.__version__


def test_forms_of_a_batch_hold_the_same_documents():
    batch = Batch.of([3, 5, 2], 50, 0, "cpu")
    for arm in speed.ARMS:
        call = batch.call(arm)
        for ids, found in zip(batch.documents, batch.by_document(arm, call["input_ids"]), strict=True):
            assert torch.equal(found, ids[0])
        targets = F.pad(call["labels"], (0, 1), value=-100)[:, 1:]
        assert int((targets != -100).sum()) == 7, "each document has one target less than tokens"
    bounds = batch.call(next(arm for arm in speed.ARMS if arm.name == "stock packed flash"))
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["cu_seq_lens_q"].tolist() == [0, 3, 8, 10]
    assert type(bounds["max_length_q"]) is int


def test_outcomes_are_read_from_pytest_alone_and_with_xdist():
    lines = [
        "tests/gpu/test_models.py::test_a[bf16-one two] PASSED            [  3%]",
        "tests/gpu/test_models.py::test_b[fp16] SKIPPED (needs a CUDA device) [ 5%]",
        "[gw1] [ 12%] FAILED tests/gpu/test_varlen.py::test_c[fp16-(16, 12)] ",
        "[gw0] [ 15%] PASSED tests/gpu/test_varlen.py::test_d ",
        "FAILED tests/gpu/test_varlen.py::test_c[fp16-(16, 12)] - AssertionError",
        "tests/gpu/test_varlen.py::test_e ",
    ]
    assert suite.outcomes(lines) == {
        "tests/gpu/test_models.py::test_a[bf16-one two]": "PASSED",
        "tests/gpu/test_models.py::test_b[fp16]": "SKIPPED",
        "tests/gpu/test_varlen.py::test_c[fp16-(16, 12)]": "FAILED",
        "tests/gpu/test_varlen.py::test_d": "PASSED",
    }

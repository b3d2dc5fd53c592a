"""torch's flash kernels, and flash-attn's signature on top of them: their arguments against torch's own signatures.

The kernels are stood in for on a CPU below torch's dispatcher; see `compat.torch_flash.aten_on_cpu`.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from autopack import tiny
from autopack.attention.backends.varlen import attend_varlen
from autopack.inspection import torches
from compat import torch_flash
from compat.standins import set_implementation
from tests.attention.written_out import LAYOUT, PATTERNS, attended, states
from tests.gpu import test_models, test_varlen

pytestmark = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("sizes", [(16, 16), (12, 10)], ids=str)
def test_arguments_pass_torchs_own_dispatcher(sizes, sinks):
    """Through `varlen_attn` and the aten operators as they are; only what they compute on a GPU is stood in for."""
    given = states(*sizes, torch.float16)
    sink = torch.linspace(-1, 2, 4).half().requires_grad_() if sinks else None
    inputs = [*given, sink] if sinks else given
    with torch_flash.aten_on_cpu():
        found = attend_varlen(LAYOUT, *given, PATTERNS["window"], 0.3, sink)
        gradients = torch.autograd.grad(found.float().square().sum(), inputs)
    expected = attended(*(each.float() for each in given), PATTERNS["window"], 0.3, sink)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for f, w in zip((found, *gradients), (expected, *wanted), strict=True):
        # Roundings to 11 bits of inputs and outputs, in values of order 1 to 10.
        torch.testing.assert_close(f.float(), w.float(), atol=2e-2, rtol=2e-2)


def test_varlen_attn_is_given_what_its_signature_and_kernel_take(monkeypatch):
    real, calls = torches.varlen_attn, []

    def spy(*args, **kwargs):
        calls.append(inspect.signature(real).bind(*args, **kwargs).arguments)
        return real(*args, **kwargs)

    monkeypatch.setattr(torches, "varlen_attn", spy)
    with torch_flash.aten_on_cpu():
        attend_varlen(LAYOUT, *states(12, 10, torch.float16), PATTERNS["causal"], None)
        package = torch_flash._module()["flash_attn"]
        q, k, v = (t.transpose(1, 2).flatten(0, 1).detach() for t in states(12, dtype=torch.float16))
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
            wide = torches.VARLEN_MAY_BE_CUDNN
            assert call["window_size"] == tuple(torches._BEYOND if wide and each == -1 else each for each in window)
            assert call.get("enable_gqa", True) is True
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
        for name in ("causal", "window"):
            test_varlen.test_sinks_take_part_in_output_and_gradients(patterns[name], torch.float16)
        test_varlen.test_without_the_sinks_the_same_test_fails(torch.float16)
        test_varlen.test_one_document_does_not_move_another(torch.float16)

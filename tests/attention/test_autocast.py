"""Under autocast rotary embeddings leave queries and keys in float32 beside values in half
precision."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.utils import counters

import autopack
from autopack import tiny
from autopack.attention import choose
from autopack.inspection import torches
from compat import torch_flash
from tests.conftest import FLOAT32, LEAK, error, positions
from tests.engine import Call, ids

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LENGTHS = (5, 12, 2, 6)
TYPES = ["llama", "qwen3", "mistral", "olmo2", "gpt2"]
LOWERED = pytest.mark.parametrize("lowered", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def _build(model_type):
    return tiny.build(model_type, attn_implementation="sdpa")


@dataclass(frozen=True)
class Lowered(Call):
    """Calls in which autocast lowers to a dtype, or to none."""

    dtype: torch.dtype | None = None
    lengths: Sequence[int] = LENGTHS

    def run(self, model, arguments):
        with (
            contextlib.nullcontext()
            if self.dtype is None
            else torch.autocast("cpu", dtype=self.dtype)
        ):
            return super().run(model, arguments)


def _distance(*results):
    """The error of logits, and that of all gradients as one vector."""
    logits = [torch.cat(each.documents).float() for each in results]
    slopes = [torch.cat([slope.flatten() for slope in each.gradients.values()]) for each in results]
    return error(*logits), float((slopes[0] - slopes[1]).norm() / slopes[1].norm())


@LOWERED
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model_type", TYPES)
def test_packed_rows_are_documents_alone_up_to_the_rounding_of_the_dtype(
    model_type, compiled, lowered
):
    stock, model, call = _build(model_type), _build(model_type), Lowered(dtype=lowered)
    wanted = call.alone(stock)
    rounding, leak = (
        _distance(wanted, Lowered().alone(stock)),
        _distance(call.undeclared(stock), wanted),
    )
    autopack.enable(model)
    if compiled:
        model.compile(backend="aot_eager")
        counters.clear()
    # Two ways to round differ by about as much as each does from float32.
    for found, size, leaked in zip(
        _distance(call.packed(model), wanted), rounding, leak, strict=True
    ):
        assert found <= 3 * size, "more than rounding"
        assert 3 * size < leaked, "rounding would hide a leak"
    assert not any("autocast" in reason for reason in counters["graph_break"])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_no_bit_of_another_document_arrives(compiled):
    model = _build("llama")
    autopack.enable(model)
    if compiled:
        model.compile(backend="aot_eager")
    rows = ids(lengths=LENGTHS).repeat(2, 1)
    rows[1, 5:17] = rows[1, 5:17].flip(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before, after = (
            model(input_ids=row[None], position_ids=positions(LENGTHS)).logits for row in rows
        )
    assert torch.equal(before[:, :5], after[:, :5])
    assert torch.equal(before[:, 17:], after[:, 17:])
    assert error(after[:, 5:17].float(), before[:, 5:17].float()) > LEAK


@LOWERED
@pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_torchs_own_kernels_are_taken_for_weights_in_float32(model_type, lowered, monkeypatch):
    real, calls = choose.attend_varlen, []

    def spy(layout, *states_and_settings):
        calls.append({states.dtype for states in states_and_settings[:3]})
        return real(layout, *states_and_settings)

    monkeypatch.setattr(choose, "attend_varlen", spy)
    stock, model, call = _build(model_type), _build(model_type), Lowered(dtype=lowered)
    wanted = call.alone(stock)
    rounding = _distance(wanted, Lowered().alone(stock))
    autopack.enable(model)
    with torch_flash.aten_on_cpu():
        found = call.packed(model)
        assert calls == [{lowered}] * len(calls)
        assert len(calls) >= model.config.num_hidden_layers
        del calls[:]
        Lowered().packed(model)
        assert not calls, "float32 without autocast is nothing for the kernel"
    for error_, size in zip(_distance(found, wanted), rounding, strict=True):
        assert error_ <= 3 * size


def test_a_compiled_model_follows_an_autocast_that_comes_and_goes():
    plain, compiled = _build("llama"), _build("llama")
    for model in (plain, compiled):
        autopack.enable(model)
    compiled.compile(backend="aot_eager")
    for lowered in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        errors = _distance(*(Lowered(dtype=lowered).packed(model) for model in (compiled, plain)))
        bound = FLOAT32 if lowered is None else 0.05  # some roundings to 8 bits; a leak is tenths
        assert max(errors) < bound, lowered

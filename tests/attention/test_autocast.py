"""Under autocast rotary embeddings leave queries and keys in float32 beside values in half precision."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._dynamo.utils import counters

import autopack
from autopack import tiny
from autopack.attention.backends import varlen
from autopack.inspection import torches
from compat import torch_flash
from tests.conftest import FLOAT32, LEAK, error, gradients, positions, token_ids

LENGTHS = (5, 12, 1, 6)
IDS = token_ids(1, sum(LENGTHS))
TYPES = ["llama", "qwen3", "mistral", "olmo2", "gpt2"]
LOWERED = pytest.mark.parametrize("lowered", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _build(model_type):
    return tiny.build(model_type, attn_implementation="sdpa")


def _autocast(dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _packed(model, dtype, ids=IDS):
    """Logits of packed rows, and the gradients of their loss."""
    model.zero_grad()
    with _autocast(dtype):
        output = model(input_ids=ids, position_ids=positions(LENGTHS), labels=ids)
    output.loss.backward()
    return output.logits.detach().float(), gradients(model)


def _alone(model, dtype):
    """The same of each document by itself: the loss is a mean over all tokens but the first of each."""
    model.zero_grad()
    logits, total = [], sum(LENGTHS) - len(LENGTHS)
    for document in IDS.split(LENGTHS, dim=1):
        with _autocast(dtype):
            output = model(input_ids=document, labels=document)
        logits.append(output.logits.detach().float())
        if document.shape[1] > 1:
            (output.loss * (document.shape[1] - 1) / total).backward()
    return torch.cat(logits, dim=1), gradients(model)


def _row_as_one_document(model, dtype):
    """What leaks look like: every document sees those before it."""
    labels = torch.where(positions(LENGTHS) == 0, -100, IDS)
    with _autocast(dtype):
        output = model(input_ids=IDS, labels=labels)
    output.loss.backward()
    return output.logits.detach().float(), gradients(model)


def _distance(found, wanted):
    """The error of logits, and that of all gradients as one vector."""
    slopes = [torch.cat([slope.flatten() for slope in each[1]]) for each in (found, wanted)]
    return error(found[0], wanted[0]), float((slopes[0] - slopes[1]).norm() / slopes[1].norm())


@pytest.mark.sampled(6)
@LOWERED
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model_type", TYPES)
def test_packed_rows_are_documents_alone_up_to_the_rounding_of_the_dtype(model_type, compiled, lowered):
    stock, model = _build(model_type), _build(model_type)
    wanted = _alone(stock, lowered)
    rounding, leak = _distance(wanted, _alone(stock, None)), _distance(_row_as_one_document(stock, lowered), wanted)
    autopack.enable(model)
    if compiled:
        model.compile(backend="aot_eager")
        counters.clear()
    # Two ways to round differ by about as much as each does from float32.
    for found, size, leaked in zip(_distance(_packed(model, lowered), wanted), rounding, leak, strict=True):
        assert found <= 3 * size, "more than rounding"
        assert 3 * size < leaked, "rounding would hide a leak"
    assert not any("autocast" in reason for reason in counters["graph_break"])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_no_bit_of_another_document_arrives(compiled):
    model = _build("llama")
    autopack.enable(model)
    if compiled:
        model.compile(backend="aot_eager")
    other = IDS.clone()
    other[0, 5:17] = other[0, 5:17].flip(0)
    (before, _), (after, _) = _packed(model, torch.bfloat16), _packed(model, torch.bfloat16, other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert torch.equal(before[:, 17:], after[:, 17:])
    assert error(after[:, 5:17], before[:, 5:17]) > LEAK


@LOWERED
@pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_torchs_own_kernels_are_taken_for_weights_in_float32(model_type, lowered, monkeypatch):
    real, calls = varlen.attend_varlen, []

    def spy(layout, *states_and_settings):
        calls.append({states.dtype for states in states_and_settings[:3]})
        return real(layout, *states_and_settings)

    monkeypatch.setattr(varlen, "attend_varlen", spy)
    stock, model = _build(model_type), _build(model_type)
    rounding = _distance(_alone(stock, lowered), _alone(stock, None))
    autopack.enable(model)
    with torch_flash.aten_on_cpu():
        found = _packed(model, lowered)
        assert calls == [{lowered}] * len(calls)
        assert len(calls) >= model.config.num_hidden_layers
        del calls[:]
        _packed(model, None)
        assert not calls, "float32 without autocast is nothing for the kernel"
    for error_, size in zip(_distance(found, _alone(stock, lowered)), rounding, strict=True):
        assert error_ <= 3 * size


def test_a_compiled_model_follows_an_autocast_that_comes_and_goes():
    plain, compiled = _build("llama"), _build("llama")
    for model in (plain, compiled):
        autopack.enable(model)
    compiled.compile(backend="aot_eager")
    for lowered in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        errors = _distance(_packed(compiled, lowered), _packed(plain, lowered))
        bound = FLOAT32 if lowered is None else 0.05  # some roundings to 8 bits; a leak is tenths
        assert max(errors) < bound, lowered


def test_float64_stays_as_it_is():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torches.taken_by_sdpa(torch.zeros(1, dtype=torch.float64)) is torch.float64
        assert torches.taken_by_sdpa(torch.zeros(1)) is torch.bfloat16
        assert torches.taken_by_sdpa(torch.zeros(1, device="meta")) is torch.float32

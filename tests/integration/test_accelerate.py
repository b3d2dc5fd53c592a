"""accelerate: what `prepare`, its hooks and its unwrapping do to an enabled model."""

from __future__ import annotations

from types import MethodType

import pytest
import torch

import autopack
from autopack import tiny
from tests.integration.documents import BFLOAT16, FLOAT32, LEAK, documents, packed_error, run_alone, run_packed
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused

accelerate = pytest.importorskip("accelerate")

TOLERANCE = {"no": FLOAT32, "bf16": BFLOAT16}


@pytest.fixture(autouse=True)
def _fresh_state():
    """accelerate keeps the first precision of a process for all later Accelerators."""
    from accelerate.state import AcceleratorState, GradientState

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    yield
    forget()


def _llama():
    return tiny.build("llama", attn_implementation="sdpa").train()


def _enable_then_prepare(accelerator, model):
    autopack.enable(model)
    return accelerator.prepare(model)


def _prepare_then_enable(accelerator, model):
    prepared = accelerator.prepare(model)
    autopack.enable(prepared)
    return prepared


ORDERS = {"enabled before": _enable_then_prepare, "enabled after": _prepare_then_enable}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def prepare(request):
    return request.param


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_prepared_model_is_exact(prepare, precision, checkpointing):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = prepare(accelerator, _llama())
    texts = documents(model.config)
    wanted = run_alone(model, texts)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert run_packed(model, texts).error(wanted) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_unwrapping_without_the_fp32_wrapper_keeps_the_model_enabled_and_exact(prepare, precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    plain = _llama()
    prepared = prepare(accelerator, plain)
    packed_error(prepared)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped is plain
    assert autopack.is_enabled(unwrapped)
    assert packed_error(unwrapped) < FLOAT32


@pytest.mark.parametrize("precision", TOLERANCE)
def test_disable_through_a_prepared_model_takes_everything_back(prepare, precision):
    """It is the control, too: without autopack, documents of the packed row meet."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = prepare(accelerator, _llama())
    autopack.disable(model)
    assert not autopack.is_enabled(model)
    assert packed_error(model) > LEAK


def _own_forward(model, mixes):
    """A forward on the instance, as trainers of TRL put one on, that goes on to the class or also mixes tokens."""

    def forward(self, input_ids=None, **kwargs):
        output = type(self).forward(self, input_ids=input_ids, **kwargs)
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True) * mixes
        return output

    model.forward = MethodType(forward, model)
    return model


def test_a_forward_in_mixed_precision_is_audited_in_that_of_the_model():
    """Rounding to bfloat16 is not taken for a leak, nor a leak for rounding."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    for mixes in (False, True):
        model = accelerator.prepare(_own_forward(_llama(), mixes))
        forward = model.__dict__["forward"]
        if mixes:
            with refused("not-exact"):
                autopack.enable(model)
        else:
            with autopack.enable(model) as handle:
                assert "by a twin of " in handle.verified
                assert packed_error(model) < BFLOAT16
                assert handle.enabled.proof.padded is None
        assert model.__dict__["forward"] is forward
        assert model(input_ids=documents(model.config)[0]).logits.dtype == torch.float32


def test_a_model_that_is_put_into_mixed_precision_later_is_audited_again():
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = _own_forward(_llama(), mixes=False)
    with autopack.enable(model) as handle:
        prepared = accelerator.prepare(model)
        prepared(**batch("causal LM", mask_of((9, 5))), use_cache=False)
        assert (handle.tally.batches, handle.tally.padding) == (1, 4)

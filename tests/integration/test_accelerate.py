"""accelerate: what `prepare`, its hooks and its unwrapping do to an enabled model."""

from types import MethodType

import pytest
import torch

import autopack
from compat.neighbours.measure import AFTER, BEFORE, TOLERANCE, Scenario, llama, wrapping
from tests.engine import Call, check, errors, ids, leaks
from tests.integration.documents import measured_exact
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused

accelerate = pytest.importorskip("accelerate")

CALL = Call(form="position_ids")
BFLOAT16 = 3e-2
"""bfloat16 keeps 8 bits (4e-3 per operation) over a few layers."""
WITHIN = {"no": TOLERANCE, "bf16": dict.fromkeys(TOLERANCE, BFLOAT16)}
in_both_orders = pytest.mark.parametrize("order", [BEFORE, AFTER])
in_both_precisions = pytest.mark.parametrize("precision", WITHIN)


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


def _accelerator(precision="bf16"):
    return accelerate.Accelerator(cpu=True, mixed_precision=precision)


@pytest.mark.parametrize("checkpointing", [False, True])
@in_both_precisions
@in_both_orders
def test_a_prepared_model_is_exact(order, precision, checkpointing):
    def prepared(model):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return _accelerator(precision).prepare(model)

    measured_exact(
        Scenario("accelerate", "prepare", wrapping(prepared), within=WITHIN[precision]), order
    )


@in_both_precisions
@in_both_orders
def test_unwrapping_without_the_fp32_wrapper_keeps_the_model_enabled_and_exact(order, precision):
    """Disabling it through what was prepared takes everything back."""
    accelerator, plain = _accelerator(precision), llama()
    prepared = wrapping(accelerator.prepare, lambda: plain)(order, autopack.enable)
    CALL.packed(prepared)
    autopack.disable(prepared)
    assert not autopack.is_enabled(prepared)
    assert leaks(CALL.packed(prepared), CALL.alone(prepared))
    autopack.enable(prepared)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped is plain
    assert autopack.is_enabled(unwrapped)
    check(CALL.packed(unwrapped), CALL.alone(llama()))


def _own_forward(model, mixes):
    """A forward on the instance, as trainers of TRL put one on, that goes on to the class or also
    mixes tokens."""

    def forward(self, input_ids=None, **kwargs):
        output = type(self).forward(self, input_ids=input_ids, **kwargs)
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True) * mixes
        return output

    model.forward = MethodType(forward, model)
    return model


def test_a_forward_in_mixed_precision_is_audited_in_that_of_the_model():
    """Rounding to bfloat16 is not taken for a leak, nor a leak for rounding."""
    accelerator = _accelerator()
    for mixes in (False, True):
        model = accelerator.prepare(_own_forward(llama().train(), mixes))
        forward = model.__dict__["forward"]
        if mixes:
            with refused("not-exact"):
                autopack.enable(model)
        else:
            with autopack.enable(model) as handle:
                assert "on a tiny copy of " in handle.verified
                assert max(errors(CALL.packed(model), CALL.alone(model)).values()) < BFLOAT16
                assert handle.enabled.proof.why_not_unpadded is None
        assert model.__dict__["forward"] is forward
        assert model(input_ids=ids()).logits.dtype == torch.float32


def test_a_model_that_is_put_into_mixed_precision_later_is_audited_again():
    accelerator = _accelerator()
    model = _own_forward(llama().train(), mixes=False)
    with autopack.enable(model) as handle:
        prepared = accelerator.prepare(model)
        prepared(**batch("causal LM", mask_of((9, 5))), use_cache=False)
        assert (handle.tally.batches, handle.tally.padding) == (1, 4)

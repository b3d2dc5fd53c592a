"""accelerate: what `prepare`, its hooks and its unwrapping do to an enabled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from tests.integration.documents import BFLOAT16, FLOAT32, LEAK, documents, packed, run_alone, run_packed
from tests.support.refusals import refused

accelerate = pytest.importorskip("accelerate")

TOLERANCE = {"no": FLOAT32, "bf16": BFLOAT16}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """accelerate keeps the first precision of a process for all later Accelerators."""
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    yield
    forget()


def _llama() -> Any:
    return tiny.build("llama", attn_implementation="sdpa").train()


def _enable_then_prepare(accelerator: Any, model: Any) -> Any:
    autopack.enable(model)
    return accelerator.prepare(model)


def _prepare_then_enable(accelerator: Any, model: Any) -> Any:
    prepared = accelerator.prepare(model)
    autopack.enable(prepared)
    return prepared


ORDERS = {"enabled before": _enable_then_prepare, "enabled after": _prepare_then_enable}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def prepare(request: pytest.FixtureRequest) -> Callable[[Any, Any], Any]:
    return request.param


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_prepared_model_is_exact(prepare, precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = prepare(accelerator, _llama())
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_without_autopack_it_leaks(precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(_llama())
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) > LEAK


@pytest.mark.parametrize("precision", TOLERANCE)
def test_unwrapping_without_the_fp32_wrapper_keeps_the_model_enabled_and_exact(prepare, precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    plain = _llama()
    prepared = prepare(accelerator, plain)
    texts = documents(plain.config)
    run_packed(prepared, texts)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped is plain
    assert autopack.is_enabled(unwrapped)
    assert run_packed(unwrapped, texts).error(run_alone(unwrapped, texts)) < FLOAT32


@pytest.mark.parametrize("precision", TOLERANCE)
def test_gradient_checkpointing_of_a_prepared_model_is_exact(prepare, precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = prepare(accelerator, _llama())
    texts = documents(model.config)
    wanted = run_alone(model, texts)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert run_packed(model, texts).error(wanted) < TOLERANCE[precision]


def test_a_training_loop_with_accumulation_ends_at_the_parameters_of_documents_alone():
    def train(calls: list[list[dict[str, torch.Tensor]]], enable: bool) -> dict[str, torch.Tensor]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1)
        model = _llama()
        if enable:
            autopack.enable(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in calls:
            count = sum(int((call["labels"][:, 1:] != -100).sum()) for call in step)
            for call in step:
                accelerator.backward(model(**call, num_items_in_batch=count).loss)
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    texts = documents(_llama().config, (7, 12, 5, 9, 11, 3, 8, 6))
    alone = [[{"input_ids": t, "labels": t} for t in texts[:4]], [{"input_ids": t, "labels": t} for t in texts[4:]]]
    rows = [[packed(texts[:2]), packed(texts[2:4])], [packed(texts[4:7]), packed(texts[7:])]]
    for step in rows:
        for row in step:
            # As collators do, so that the loop above counts the targets that there are.
            row["labels"] = row["labels"].masked_fill(row["position_ids"] == 0, -100)
    found, wanted = train(rows, enable=True), train(alone, enable=False)
    for name, parameter in wanted.items():
        # Two steps of rate 0.1 on gradients of order 1, in float32.
        torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=1e-5)


def test_a_model_with_device_hooks_is_exact(prepare):
    """`add_hook_to_module` replaces `forward` on the instance, also by `dispatch_model` and `cpu_offload`."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def add_hooks(model: Any) -> Any:
        for module in model.modules():
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
        return model

    class Hooking:
        prepare = staticmethod(add_hooks)

    model = prepare(Hooking, _llama())
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) < FLOAT32


def test_disable_through_a_prepared_model_takes_everything_back(prepare):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = prepare(accelerator, _llama())
    autopack.disable(model)
    assert not autopack.is_enabled(model)
    texts = documents(model.config)
    assert run_packed(model, texts).error(run_alone(model, texts)) > LEAK


def _own_forward(model: Any, mixes: bool) -> Any:
    """A forward on the instance, as trainers of TRL put one on, that goes on to the class or also mixes tokens."""

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
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
                texts = documents(model.config)
                assert run_packed(model, texts).error(run_alone(model, texts)) < BFLOAT16
                assert handle.enabled.proof.padded is None
        assert model.__dict__["forward"] is forward
        assert model(input_ids=documents(model.config)[0]).logits.dtype == torch.float32


def test_a_model_that_is_put_into_mixed_precision_later_is_audited_again():
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = _own_forward(_llama(), mixes=False)
    with autopack.enable(model) as handle:
        prepared = accelerator.prepare(model)
        ids = torch.randint(3, 50, (2, 9))
        mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
        prepared(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
        assert (handle.tally.batches, handle.tally.padding) == (1, 4)

"""Gradients that are asked for of the outputs of a padded batch: the loss has them in its graph, as stock's has."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

import autopack
from autopack.calls.outputs import restore
from autopack.layout.padding import Padding
from tests.conftest import LEAK
from tests.support.padded import FLOAT32, GRADIENT, PADDED, batch, build, mask_of, model_gradient_error, tally_of, twins

KINDS = ["llama", "gpt2", "qwen2_moe", "mamba", "bloom"]
REAL = np.array([[1, 1, 0], [1, 1, 1]], bool)
PADDING = Padding(REAL, torch.device("cpu"))


@pytest.fixture(params=KINDS)
def pair(request):
    """A stock model and an enabled one with the same parameters."""
    stock, model = twins(build(request.param, attn_implementation="eager"))
    if request.param == "qwen2_moe":
        for which in (stock, model):
            which.config.output_router_logits = True  # a way from the parameters to the loss that passes no logits
    with autopack.enable(model):
        yield stock, model
        assert tally_of(model).batches


def _call(model, **options):
    model.zero_grad(set_to_none=True)
    inputs = batch("causal LM", mask_of(PADDED, "right"))
    return model(**inputs, use_cache=False, output_hidden_states=True, **options)


def _gradient(output, loss, of):
    return torch.autograd.grad(loss(output), of(output))[0]


def _error(found, expected):
    """Largest difference at real tokens, relative to the largest entry; padding gets no gradient that matters."""
    real = mask_of(PADDED, "right").bool()
    return float((found - expected)[real].abs().max() / expected[real].abs().max())


OF = {
    "logits": lambda output: output.logits,
    "states of a layer": lambda output: output.hidden_states[1],
    "logits by name": lambda output: output["logits"],
}


@pytest.mark.parametrize("of", OF.values(), ids=list(OF))
def test_a_gradient_that_is_asked_for(pair, of):
    expected, found = (_gradient(_call(which), lambda o: o.loss, of) for which in pair)
    assert _error(found, expected) < GRADIENT


@pytest.mark.parametrize("of", OF.values(), ids=list(OF))
def test_a_gradient_that_is_retained_counts_once(pair, of):
    shown = []
    for which in pair:
        output = _call(which)
        of(output).retain_grad()
        (2 * output.loss).backward()
        shown.append(of(output).grad)
    assert _error(shown[1], shown[0]) < GRADIENT
    assert model_gradient_error(pair[1], pair[0]) < GRADIENT


def test_a_gradient_that_a_hook_changes(pair):
    for which in pair:
        output = _call(which)
        output.logits.register_hook(lambda gradient: gradient * 3)
        output.loss.backward()
    assert model_gradient_error(pair[1], pair[0]) < GRADIENT


def test_a_loss_of_ones_own_beside_that_of_the_model(pair):
    real = mask_of(PADDED, "right")[..., None]
    shown = []
    for which in pair:
        output = _call(which)
        output.logits.retain_grad()
        (output.loss + 0.1 * (output.logits * real).pow(2).mean()).backward()
        shown.append(output.logits.grad)
    assert _error(shown[1], shown[0]) < GRADIENT
    assert model_gradient_error(pair[1], pair[0]) < GRADIENT


def test_losses_that_go_backward_one_after_another(pair):
    """What the first has sent to the logits is none of the second's."""
    real = mask_of(PADDED, "right")[..., None]
    for which in pair:
        output = _call(which)
        torch.autograd.grad(output.loss, output.logits, retain_graph=True)
        (output.logits * real).pow(2).mean().backward(retain_graph=True)
        output.loss.backward()
    assert model_gradient_error(pair[1], pair[0]) < GRADIENT


def test_gradients_of_a_tuple(pair):
    shape = pair[0].config.vocab_size
    loss, logits = (lambda o: o[0]), (lambda o: next(part for part in o[1:] if part.shape[-1:] == (shape,)))
    expected, found = (_gradient(_call(which, return_dict=False), loss, logits) for which in pair)
    assert _error(found, expected) < GRADIENT


def test_gradients_of_gradients():
    """The norm of a gradient as a penalty."""
    stock, model = twins(build("llama"))
    stock.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    with autopack.enable(model):
        for which in (stock, model):
            output = _call(which)
            (slope,) = torch.autograd.grad(output.loss, output.logits, create_graph=True)
            (output.loss + slope.pow(2).sum()).backward()
    assert model_gradient_error(model, stock) < GRADIENT


def test_without_being_taken_out_it_would_count_twice(monkeypatch):
    stock, model = twins(build("llama"))
    monkeypatch.setattr(torch._C, "_current_graph_task_id", iter(range(1000)).__next__)
    with autopack.enable(model):
        for which in (stock, model):
            output = _call(which)
            output.logits.retain_grad()
            output.loss.backward()
    assert model_gradient_error(model, stock) > LEAK


class TestCost:
    def _output(self):
        states = torch.randn(1, 5, 6, requires_grad=True)
        logits = states * 1
        return states, restore(CausalLMOutputWithPast(loss=logits.sum(), logits=logits), PADDING), weakref.ref(logits)

    def test_the_packed_result_is_let_go_with_the_output(self):
        _, output, packed = self._output()
        loss = output.loss
        assert packed() is not None
        del output
        assert packed() is None
        loss.backward()

    def test_what_nobody_reads_has_no_memory(self, monkeypatch):
        restored = []
        monkeypatch.setattr(Padding, "restore", lambda *a: restored.append(a))
        states, output, _ = self._output()
        assert not restored
        output.loss.backward()
        assert not restored
        assert torch.equal(states.grad, torch.ones(1, 5, 6))

    def test_nothing_is_run_twice_for_what_is_read_and_not_differentiated(self, monkeypatch):
        states, output, _ = self._output()
        assert output.logits.requires_grad
        monkeypatch.setattr(torch.autograd, "grad", None)
        output.loss.backward()
        assert torch.equal(states.grad, torch.ones(1, 5, 6))


def test_reading_gives_the_values_of_the_batch(pair):
    expected, found = map(_call, pair)
    assert found.logits.stride() == expected.logits.stride()
    assert _error(found.logits, expected.logits) < FLOAT32
    assert found.logits.grad_fn is not None


def test_loss_and_logits_that_are_changed_in_place(pair):
    for which in pair:
        output = _call(which)
        output.loss.div_(2)
        output.loss.backward()
        output.logits.mul_(2)
    assert model_gradient_error(pair[1], pair[0]) < GRADIENT

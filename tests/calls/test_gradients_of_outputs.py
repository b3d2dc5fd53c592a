"""Gradients that are asked for of the outputs of a padded batch: the loss has them in its graph, as
stock's has."""

from functools import partial

import pytest
import torch

import autopack
from tests.conftest import LEAK
from tests.support.padded import (
    GRADIENT,
    PADDED,
    agree,
    batch,
    build,
    mask_of,
    model_gradient_error,
    tally_of,
    twins,
)

KINDS = ["llama", "gpt2", "qwen2_moe", "mamba", "bloom"]


def _twins(model_type):
    """A stock model and one to be enabled, with the same parameters."""
    stock = build(model_type, attn_implementation="eager")
    if model_type == "qwen2_moe":
        # a way from the parameters to the loss that passes no logits
        stock.config.output_router_logits = True
    return twins(stock)


@pytest.fixture(params=KINDS)
def pair(request):
    stock, model = _twins(request.param)
    with autopack.enable(model):
        yield stock, model
        assert tally_of(model).batches


def _call(model, **options):
    model.zero_grad(set_to_none=True)
    inputs = batch("causal LM", mask_of(PADDED))
    return model(**inputs, use_cache=False, output_hidden_states=True, **options)


@pytest.mark.parametrize("kind", ["llama", "blenderbot"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_states_beside_a_loss_do_not_stop_checkpoints(kind, reentrant):
    """A reentrant checkpoint runs in no pass that asks for single gradients, and nobody asks for
    those of states."""
    stock, model = pair = _twins(kind)
    with autopack.enable(model):
        for which in pair:
            which.gradient_checkpointing_enable({"use_reentrant": reentrant})
        inputs = batch("causal LM", mask_of(PADDED))
        for _ in range(3):
            agree(model, stock, inputs, use_cache=False, output_hidden_states=True)
        assert tally_of(model).batches


def _error(found, expected):
    """Largest difference at real tokens, relative to the largest entry; padding gets no gradient
    that matters."""
    real = mask_of(PADDED).bool()
    return float((found - expected)[real].abs().max() / expected[real].abs().max())


OF = {
    "logits": lambda output: output.logits,
    "states of a layer": lambda output: output.hidden_states[1],
}


REAL_TOKENS = mask_of(PADDED)[..., None]


def _asked(output, of):
    (gradient,) = torch.autograd.grad(output.loss, of(output), retain_graph=True)
    output.loss.backward()
    return gradient


def _retained(output, of=OF["logits"]):
    of(output).retain_grad()
    (2 * output.loss).backward()
    return of(output).grad


def _changed_by_a_hook(output):
    output.logits.register_hook(lambda gradient: gradient * 3)
    output.loss.backward()


def _beside_a_loss_of_ones_own(output):
    output.logits.retain_grad()
    (output.loss + 0.1 * (output.logits * REAL_TOKENS).pow(2).mean()).backward()
    return output.logits.grad


def _one_after_another(output):
    """What the first loss has sent to the logits is none of the second's."""
    torch.autograd.grad(output.loss, output.logits, retain_graph=True)
    (output.logits * REAL_TOKENS).pow(2).mean().backward(retain_graph=True)
    output.loss.backward()


def _changed_in_place(output):
    output.loss.div_(2)
    output.loss.backward()
    output.logits.mul_(2)


def _norm_of_a_gradient(output):
    """A gradient of gradients."""
    (slope,) = torch.autograd.grad(output.loss, output.logits, create_graph=True)
    (output.loss + slope.pow(2).sum()).backward()


USES = {
    f"{how.__name__} {name}": partial(how, of=of)
    for how in (_asked, _retained)
    for name, of in OF.items()
} | {
    how.__name__: how
    for how in (
        _changed_by_a_hook,
        _beside_a_loss_of_ones_own,
        _one_after_another,
        _changed_in_place,
        _norm_of_a_gradient,
    )
}


@pytest.mark.parametrize("use", USES.values(), ids=[*USES])
def test_gradients_however_outputs_are_used(pair, use):
    expected, found = (use(_call(which)) for which in pair)
    assert expected is None or _error(found, expected) < GRADIENT
    assert model_gradient_error(*reversed(pair)) < GRADIENT


def test_without_being_taken_out_it_would_count_twice(monkeypatch):
    stock, model = _twins("llama")
    with autopack.enable(model):
        monkeypatch.setattr(torch._C, "_current_graph_task_id", iter(range(1000)).__next__)
        for which in (stock, model):
            _retained(_call(which))
    assert model_gradient_error(model, stock) > LEAK


COMMON = (24, 20, 22, 21)
"""Documents that have their first sixteen tokens in common, where they have any."""


def test_states_that_are_asked_for_keep_rows_apart_and_only_they_do():
    model = build("llama")
    inputs = {**batch("causal LM", mask_of(COMMON)), "use_cache": False}
    inputs["input_ids"][:, :16] = inputs["input_ids"][0, :16]
    with autopack.enable(model) as handle:
        model(**inputs)
        assert handle.tally.training.shared
        assert not handle.tally.apart
        model(**inputs, output_hidden_states=True)
        assert any("hidden states are asked for" in reason for reason in handle.tally.apart)
        with torch.no_grad():
            model(**inputs, output_hidden_states=True)
        assert sum(handle.tally.apart.values()) == 1

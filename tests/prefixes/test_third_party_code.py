"""Rows share only where all code that they run is the libraries' own, or where the user asks for it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import autopack
from tests.support.padded import FLOAT32, build, logit_error, model_gradient_error
from tests.support.prefixes import loss_of_logits, padded, tree

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Clamped(torch.nn.Module):
    """Clamps the gradient of each token."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        states = self.inner(states)
        if states.requires_grad:
            states.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        return states


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1e-6 + gradient.norm(dim=-1, keepdim=True))


class Normalised(Clamped):
    """Normalises the gradient of each token."""

    def forward(self, states):
        return Halved.apply(self.inner(states))


class Mine(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def _replaced(kind):
    def change(model):
        model.model.layers[0].mlp = kind(model.model.layers[0].mlp)

    return change


def _on_an_instance(model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: Halved.apply(forward(states))


def _hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: Halved.apply(output))


def _hooked_backward(model):
    model.model.layers[0].mlp.register_full_backward_hook(
        lambda module, to_input, to_output: (to_input[0].clamp(-1e-4, 1e-4),)
    )


def _subclass(model):
    model.__class__ = Mine


CODE = {
    "a clamped gradient": _replaced(Clamped),
    "a normalised gradient": _replaced(Normalised),
    "a function on an instance": _on_an_instance,
    "a forward hook": _hooked,
    "a full backward hook": _hooked_backward,
    "a subclass": _subclass,
}


def _trained(model, batch):
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    loss_of_logits(logits, batch).backward()
    return logits


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CODE.values(), ids=CODE)
def test_third_party_code_computes_every_row(change, when):
    """Put on before the model is enabled, or after a call that has shared."""
    stock = build("llama").train()
    model, batch = copy.deepcopy(stock), padded(tree())
    change(stock)
    if when == "before":
        change(model)
    with autopack.enable(model, unpad="always") as handle:
        if when == "after":
            _trained(model, batch)
            assert handle.tally.training.shared > 40
            change(model)
        before = handle.tally.training.shared
        found, wanted = _trained(model, batch), _trained(stock, batch)
        assert handle.tally.training.shared == before
        assert logit_error(found, wanted, batch["attention_mask"]) < FLOAT32
        assert model_gradient_error(model, stock) < 10 * FLOAT32

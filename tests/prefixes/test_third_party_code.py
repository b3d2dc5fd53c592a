"""Rows share only where all code that they run is the libraries' own."""

import copy

import pytest
import torch

from tests.calls.test_state_over_padding import Around, InBuffer
from tests.proving.untouched import Mine
from tests.support.padded import agree, build, packs_at_once, trained
from tests.support.prefixes import padded, tree


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1e-6 + gradient.norm(dim=-1, keepdim=True))


class Normalised(Around):
    """Normalises the gradient of each token."""

    def forward(self, states):
        return Halved.apply(self.inner(states))


def _replaced(kind):
    def change(model):
        model.model.layers[0].mlp = kind(model.model.layers[0].mlp)

    return change


def _on_an_instance(model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: Halved.apply(forward(states))


def _hooked(model):
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, given, output: Halved.apply(output)
    )


def _hooked_backward(model):
    model.model.layers[0].mlp.register_full_backward_hook(
        lambda module, to_input, to_output: (to_input[0].clamp(-1e-4, 1e-4),)
    )


def _subclass(model):
    model.__class__ = Mine


CODE = {
    "a normalised gradient": _replaced(Normalised),
    "a running mean": _replaced(InBuffer),
    "a function on an instance": _on_an_instance,
    "a forward hook": _hooked,
    "a full backward hook": _hooked_backward,
    "a subclass": _subclass,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CODE.values(), ids=CODE)
def test_third_party_code_computes_every_row(change, when):
    """Put on before the model is enabled, or after a call that has shared."""
    stock = build("llama").train()
    model, batch = copy.deepcopy(stock), padded(tree())
    change(stock)
    if when == "before":
        change(model)
    with packs_at_once(model) as handle:
        if when == "after":
            trained(model, batch, use_cache=False)
            assert handle.tally.training.shared > 40
            change(model)
        before = handle.tally.training.shared
        agree(model, stock, batch, use_cache=False)
        assert handle.tally.training.shared == before

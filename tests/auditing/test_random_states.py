"""Generators of random numbers are put back: torch's on every kind of device, each with functions of its own, Python's
and numpy's."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from autopack.inspection import randomness
from autopack.inspection.randomness import drawing_nothing, state_of


def _accelerator(states, numbered):
    """A device's module of torch: with numbers of devices, or without as that of MPS in earlier releases."""

    def get_rng_state(device=0):
        return states[device].clone()

    def set_rng_state(new_state, device=0):
        states[device] = new_state.clone()

    if numbered:
        return SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    return SimpleNamespace(get_rng_state=lambda: get_rng_state(), set_rng_state=lambda state: set_rng_state(state))


@pytest.mark.parametrize("numbered", [True, False], ids=["many devices", "one device"])
def test_generators_are_left_as_found(monkeypatch, numbered):
    states = {number: torch.arange(number, number + 4, dtype=torch.uint8) for number in range(2)}
    monkeypatch.setattr(torch, "some_accelerator", _accelerator(states, numbered), raising=False)
    devices = [("some_accelerator", number) for number in range(1 + numbered)]
    monkeypatch.setattr(randomness, "_devices_of", lambda module: devices)
    module = nn.Linear(2, 2)
    before = state_of(module)

    def draw():
        with drawing_nothing(module):
            torch.rand(3)
            random.random()
            np.random.rand(2)
            for number in states:
                states[number] = torch.zeros(4, dtype=torch.uint8)
            raise KeyError

    with pytest.raises(KeyError):
        draw()
    assert state_of(module) == before
    for change in (lambda: torch.rand(1), random.random, np.random.rand):
        last = state_of(module)
        change()
        assert state_of(module) != last


def test_an_audit_draws_nothing_of_pythons_and_numpys_generators():
    """A layer of one's own may skip itself by `random.random()`, and a shuffled data set must not notice an audit."""
    model = tiny.build("llama")

    class Drawing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, states):
            random.random()
            np.random.rand()
            return self.inner(states)

    model.model.layers[0].mlp = Drawing(model.model.layers[0].mlp)
    before = state_of(model)
    assert autopack.audit(model, modes=("default",), gradients=False).results
    assert state_of(model) == before
    with autopack.enable(model):
        assert state_of(model) == before

"""Generators of random numbers are put back: torch's on every kind of device, each with functions of its own, Python's
and numpy's."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

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

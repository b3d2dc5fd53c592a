"""Generators of random numbers are put back: torch's on every kind of device, each with functions
of its own, Python's and numpy's."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from autopack.inspection import randomness
from autopack.inspection.randomness import generators_restored, state_of


def test_generators_are_left_as_found(monkeypatch):
    states = {number: torch.arange(number, number + 4, dtype=torch.uint8) for number in range(2)}

    def set_rng_state(new_state, device=0):
        states[device] = new_state.clone()

    kind = SimpleNamespace(
        get_rng_state=lambda device=0: states[device].clone(), set_rng_state=set_rng_state
    )
    monkeypatch.setattr(torch, "some_accelerator", kind, raising=False)
    monkeypatch.setattr(
        randomness, "_devices_of", lambda module: [("some_accelerator", 0), ("some_accelerator", 1)]
    )
    module = nn.Linear(2, 2)
    before = state_of(module)

    def draw():
        with generators_restored(module):
            torch.rand(3)
            random.random()
            np.random.rand(2)
            for number in states:
                states[number] = torch.zeros(4, dtype=torch.uint8)
            raise KeyError

    with pytest.raises(KeyError):
        draw()
    assert state_of(module) == before

"""Generators of accelerators are put back like the CPU's: each kind of device has its own functions in torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autopack.inspection import torches


def _accelerator(states: dict[int, torch.Tensor], numbered: bool) -> SimpleNamespace:
    """A device's module of torch: with numbers of devices, or without as that of MPS in earlier releases."""

    def get_rng_state(device=0):
        return states[device].clone()

    def set_rng_state(new_state, device=0):
        states[device] = new_state.clone()

    def set_only_state(new_state):
        set_rng_state(new_state)

    if numbered:
        return SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    return SimpleNamespace(get_rng_state=lambda: get_rng_state(), set_rng_state=set_only_state)


@pytest.mark.parametrize("numbered", [True, False], ids=["many devices", "one device"])
def test_generators_of_other_devices_are_left_as_found(monkeypatch, numbered):
    states = {number: torch.arange(number, number + 4, dtype=torch.uint8) for number in range(2)}
    monkeypatch.setattr(torch, "some_accelerator", _accelerator(states, numbered), raising=False)
    generators = [("some_accelerator", number) for number in range(1 + numbered)]
    before = torches.states_of(generators)

    def draw() -> None:
        with torches.drawing_nothing(generators):
            torch.rand(3)
            for number in states:
                states[number] = torch.zeros(4, dtype=torch.uint8)
            raise KeyError

    with pytest.raises(KeyError):
        draw()
    after = torches.states_of(generators)
    assert len(after) == 2 + numbered
    assert all(map(torch.equal, before, after))


def test_functions_of_torch_have_one_of_those_forms():
    """`_at` hands on a number where there is a parameter of that name."""
    for kind in ("cuda", "xpu", "mps"):
        for name in ("get_rng_state", "set_rng_state"):
            parameters = list(torches.inspect.signature(getattr(getattr(torch, kind), name)).parameters)
            own = ["new_state"] * (name == "set_rng_state")
            assert parameters in (own, [*own, "device"])


def test_devices_without_generators_have_none():
    assert torches.generators_of(nn.Linear(2, 2)) == []
    assert torches.generators_of(nn.Linear(2, 2, device="meta")) == []

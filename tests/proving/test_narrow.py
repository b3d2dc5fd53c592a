"""A large module is proven by a narrower copy of itself, and by itself where that does not run."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from autopack.proving.narrow import narrowed
from autopack.proving.parts import why_not_token_wise


class Listening(nn.Linear):
    """A linear layer that notes how wide the states were that it was run on."""

    widths: ClassVar[set[int]] = set()

    def forward(self, states):
        Listening.widths.add(states.shape[-1])
        return super().forward(states)


class Rolled(nn.Linear):
    def forward(self, states):
        return super().forward(states.roll(1, dims=1))


class AfterMany(nn.Linear):
    """Mixes tokens where there are more of them than a number that it holds."""

    def __init__(self, size: int, limit: int, **made):
        super().__init__(size, size, **made)
        self.limit = limit

    def forward(self, states):
        out = super().forward(states)
        return out + out.mean(1, keepdim=True) if states.shape[1] > self.limit else out


class OfHeads(nn.Module):
    """Has a size of its own in its code, which no weight has."""

    seen: ClassVar[set[int]] = set()

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(1024, 1024)

    def forward(self, states):
        OfHeads.seen.add(states.shape[-1])
        return self.project(states).unflatten(-1, (16, 64)).softmax(-1).flatten(-2)


class Normed(nn.Module):
    def __init__(self, **made):
        super().__init__()
        self.norm = nn.LayerNorm(2048, **made)
        self.up, self.down = nn.Linear(2048, 4096, **made), nn.Linear(4096, 2048, **made)

    def forward(self, states):
        return states + self.down(torch.relu(self.up(self.norm(states))))


def test_sizes_are_divided_and_the_module_is_left_as_it_was():
    module = Normed()
    before = {name: (id(p), p.shape) for name, p in module.named_parameters()}
    found, widths = narrowed(module, [2048, 4096, 64])
    assert widths == [128, 256, 64]
    assert type(found) is Normed
    assert (found.up.in_features, found.up.out_features) == (128, 256)
    assert found.norm.normalized_shape == (128,)
    assert found(torch.randn(1, 3, 128)).shape == (1, 3, 128)
    assert {name: (id(p), p.shape) for name, p in module.named_parameters()} == before
    assert module.up.in_features == 2048


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_narrow_one_is_run_and_a_little_of_the_wide_one(device, dtype):
    Listening.widths.clear()
    module = Listening(4096, 1024, device=device, dtype=dtype)
    assert why_not_token_wise(module) is None
    assert Listening.widths == {512, 4096}  # of its own width five tokens alone, forward


def test_a_large_module_of_several_sizes_is_proven():
    assert why_not_token_wise(Normed(device="meta", dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("module", [
    Rolled(2048, 2048, device="meta"),
    AfterMany(2048, 24, device="meta"),
    AfterMany(2048, 1024, device="meta"),  # past any length that is tried, but for its number, which is divided too
])  # fmt: skip
def test_one_that_mixes_tokens_is_not(module):
    assert "changes another token's result" in why_not_token_wise(module)


def test_one_that_does_not_run_narrow_is_run_as_it_is():
    OfHeads.seen.clear()
    assert narrowed(OfHeads())[0].project.in_features == 128
    assert why_not_token_wise(OfHeads()) is None
    assert 1024 in OfHeads.seen


def test_what_has_no_narrow_copy():
    assert narrowed(nn.Linear(64, 64)) is None  # nothing to divide
    assert narrowed(nn.Linear(1021, 1024)) is None
    whole = nn.Module()
    whole.register_buffer("weight", torch.zeros(1024, 1024, dtype=torch.int8))
    assert narrowed(whole) is None


class ByWidth(nn.Linear):
    """Mixes tokens where it is wide, which no narrower copy is."""

    def forward(self, states):
        out = super().forward(states)
        return out + out.mean(1, keepdim=True) if states.shape[-1] >= 1024 else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_that_mixes_tokens_at_its_own_width_alone(device, dtype):
    module = ByWidth(2048, 2048, device=device, dtype=dtype)
    assert "(at its own width, where a narrower copy does not)" in why_not_token_wise(module)


class InOneMode(ByWidth):
    """Does so in training alone, or in evaluation alone, and is another layer in the other one."""

    def __init__(self, trains: bool, scale: float):
        super().__init__(2048, 2048, device="meta")
        self.trains, self.scale = trains, scale

    def forward(self, states):
        return super().forward(states) if self.training == self.trains else nn.Linear.forward(self, self.scale * states)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("trains", [True, False])
def test_one_that_mixes_tokens_at_its_own_width_in_one_mode_alone(trains, scale):
    assert "(at its own width, where a narrower copy does not)" in why_not_token_wise(InOneMode(trains, scale))


def test_one_that_is_another_in_training_is_proven():
    class Doubled(nn.Linear):
        def forward(self, states):
            return super().forward(states) * (2.0 if self.training else 1.0)

    assert why_not_token_wise(Doubled(2048, 2048, device="meta")) is None


def test_values_that_are_no_numbers_prove_nothing():
    module = nn.Linear(16, 16)
    nn.init.constant_(module.bias, float("inf"))
    assert why_not_token_wise(module) == "it gives what is no number (1 x 2 tokens, in training)"

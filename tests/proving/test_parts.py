"""Modules that are proven by themselves: those that look at one token pass, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopack.proving.parts import Form, why_not_token_wise

WIDTH = 24


class _Averaging(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, slopes):
        return slopes.mean(dim=1, keepdim=True).expand_as(slopes)


class _Scaled(torch.autograd.Function):
    """A gradient of a weight that is no sum over tokens."""

    @staticmethod
    def forward(ctx, states, weight):
        ctx.save_for_backward(states, weight)
        return states * weight

    @staticmethod
    def backward(ctx, slopes):
        states, weight = ctx.saved_tensors
        return slopes * weight, (slopes * states).flatten(0, -2).mean(dim=0)


class _InPlace(torch.autograd.Function):
    """A square whose backward writes over what it has saved, as Liger's kernels do to save memory."""

    @staticmethod
    def forward(ctx, states):
        ctx.save_for_backward(states)
        return states**2

    @staticmethod
    def backward(ctx, slopes):
        (states,) = ctx.saved_tensors
        return states.data.mul_(2 * slopes).clone()


class Function(nn.Module):
    """A module of one function of its states."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, states):
        return self.function(self, self.linear(states))


class Below(nn.Linear):
    """Gradients are averaged below its weight, where nothing but what they are handed to shows it."""

    def forward(self, states):
        return super().forward(_Averaging.apply(states))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, states):
        return self.down(nn.functional.silu(self.gate(states)) * self.up(states))


class Residual(nn.Module):
    """A norm that adds a residual, and gives both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, states, residual=None):
        residual = states if residual is None else states + residual
        scale = residual.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return residual * scale * self.weight, residual


class Quantised(nn.Linear):
    """Eight bits, with a scale for each token or one for all."""

    def __init__(self, per_token):
        super().__init__(WIDTH, WIDTH)
        self.per_token = per_token

    def forward(self, states):
        largest = states.detach().abs().amax(-1, keepdim=True) if self.per_token else states.detach().abs().max()
        scale = largest / 127
        rounded = (states / scale).round() * scale
        return super().forward(states + (rounded - states).detach())


class Flattening(nn.Linear):
    def forward(self, states):
        return super().forward(states.reshape(-1, states.shape[-1])).view(*states.shape[:-1], -1)


class Windowed(nn.Module):
    """Looks at its neighbours in rows that are longer than its window."""

    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, states):
        return states + states.roll(1, 1) if states.shape[1] > self.window else states


def mixing(condition):
    return Function(lambda self, s: s + s.mean(dim=1, keepdim=True) if condition(self, s) else s)


TOKEN_WISE = {
    "a backward in place": lambda: Function(lambda self, s: _InPlace.apply(s)),
    "linear": lambda: nn.Linear(WIDTH, 40),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "gated": Gated,
    "residual": Residual,
    "quantised by token": lambda: Quantised(True),
    "flattening": lambda: Flattening(WIDTH, WIDTH),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)),
    "bfloat16": lambda: nn.Linear(WIDTH, 40).bfloat16(),
    "frozen": lambda: nn.Linear(WIDTH, 40).requires_grad_(False),
    "a large window": lambda: Function(lambda self, s: s * 2),
}
MIXING = {
    "norm over the row": lambda: Function(lambda self, s: s / s.std(dim=1, keepdim=True)),
    "quantised as a whole": lambda: Quantised(False),
    "sum of all before": lambda: Function(lambda self, s: s.cumsum(1)),
    "shift by one": lambda: Function(lambda self, s: s + s.roll(1, 1)),
    "batch statistics": lambda: mixing(lambda self, s: self.training),
    "in evaluation": lambda: mixing(lambda self, s: not self.training),
    "backward": lambda: Function(lambda self, s: _Averaging.apply(s)),
    "backward below its weight": lambda: Below(WIDTH, WIDTH),
    "gradient of a weight": lambda: Function(lambda self, s: _Scaled.apply(s, self.linear.bias)),
    "beyond 64 tokens": lambda: mixing(lambda self, s: s.shape[1] > 64),
    "multiples of 16": lambda: mixing(lambda self, s: s.shape[1] % 16 == 0),
    "three rows": lambda: mixing(lambda self, s: s.shape[0] > 2),
    "beyond its window": lambda: Windowed(200),
    "softmax over the row": lambda: nn.Softmax(dim=1),
    "capacity": lambda: Function(lambda self, s: torch.cat([s[:, :32], 0 * s[:, 32:]], dim=1)),
    "recurrent": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "one for the row": lambda: Function(lambda self, s: s.mean(dim=1)),
}


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_what_looks_at_one_token(name):
    assert why_not_token_wise(TOKEN_WISE[name]()) is None


@pytest.mark.parametrize("name", MIXING)
def test_what_looks_at_others(name):
    assert why_not_token_wise(MIXING[name]()) is not None


def test_it_is_called_as_its_like_is():
    """A narrow one is called with two tensors of states; without that, the second would be left out."""

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, states, residual=None):
            return self.linear(states) + (0 if residual is None else residual.mean(dim=1, keepdim=True))

    form = Form((torch.zeros(1, 7, 8),), {"residual": torch.zeros(1, 7, 8)}, 7)
    assert why_not_token_wise(Adding()) is None
    assert "another token's" in why_not_token_wise(Adding(), form)


def test_on_the_meta_device():
    assert why_not_token_wise(nn.Linear(WIDTH, WIDTH, device="meta")) is None
    mixes = Function(lambda self, s: s.cumsum(1)).to("meta")
    assert why_not_token_wise(mixes) is not None
    assert all(parameter.is_meta for parameter in mixes.parameters())


def test_it_is_left_as_it_was_found():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).train()
    weights, state = module[0].weight.clone(), torch.get_rng_state()
    assert why_not_token_wise(module) is None
    assert module.training
    assert module[1].p == 0.5
    assert module[0].weight.grad is None
    assert torch.equal(module[0].weight, weights)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_run_is_not_proven():
    class Broken(nn.Module):
        def forward(self, states):
            raise ArithmeticError("out of order")

    assert why_not_token_wise(Broken()) == "no states were found that it takes by itself"

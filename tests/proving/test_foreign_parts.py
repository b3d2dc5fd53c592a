"""Parts that people put into models: the first call of the form in which one mixes tokens is
refused, and no other.

Toys of them, such as treat every token by itself and such as mix them; nothing here needs another
library."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.engine import counted
from tests.support.refusals import refused


class Part(nn.Module):
    """A linear layer of one's own, and what the others are made from: states (rows, tokens,
    width_in) come in."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) / width_in**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(width_out))

    def before(self, states):
        return states

    def forward(self, states):
        return self.before(states) @ self.weight.T + self.bias


class _AveragesBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(1, keepdim=True)


class _ClipsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight):
        ctx.save_for_backward(states, weight)
        return states @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        states, weight = ctx.saved_tensors
        own = gradient.flatten(0, -2).T @ states.flatten(0, -2)
        return gradient @ weight, own / own.norm().clamp(min=1.0)


class ClipsBack(Part):
    """Token by token but for the gradient of its weight, which is clipped for all tokens
    together."""

    def forward(self, states):
        return _ClipsBack.apply(states, self.weight) + self.bias


def having(change):
    """A part that makes something else of all states of a call first."""
    return type("Having", (Part,), {"before": change})


def mixing_where(condition):
    return having(lambda part, states: _mean(states) if condition(part, states) else states)


def _mean(states):
    return states + states.mean(1, keepdim=True)


FORM = {"rows": 2, "tokens": 24, "dtype": torch.float64, "train": True}
MIXING = {
    "AveragesBack": (having(lambda _, x: _AveragesBack.apply(x)), {}),
    "ClipsBack": (ClipsBack, {}),
    "single precision": (
        mixing_where(lambda _, x: x.dtype == torch.float32),
        {"dtype": torch.float32},
    ),
    "evaluation": (mixing_where(lambda part, _: not part.training), {"train": False}),
}
"""How tokens are mixed, and in what form of call that shows."""


@pytest.mark.parametrize("name", ["nothing", *MIXING])
def test_what_checks_say_of_a_model_with_a_part(name):
    """A Llama whose first layer has it in the place of its gate."""
    kind, form = MIXING.get(name, (Part, {}))
    rows, tokens, dtype, train = (FORM | form).values()
    model = tiny.build("llama", max_position_embeddings=512, use_cache=False)
    layer, half = model.model.layers[0], tokens // 2
    layer.post_attention_layernorm.weight.data *= 3  # some states are outliers
    layer.mlp.gate_proj = kind(model.config.hidden_size, model.config.intermediate_size)
    model.to(dtype).train(train)
    ids = tiny.tokens(model.config, rows, tokens)
    where = counted((half, tokens - half)).expand(rows, -1)
    with autopack.enable(model) as handle:
        with refused("leak-detected") if name in MIXING else nullcontext():
            output = model(input_ids=ids, position_ids=where, labels=ids)
            if train:
                output.loss.backward()
        assert (handle.checked.checks, handle.checked.leaks) == (1, name in MIXING)
        assert not handle.checked.skipped

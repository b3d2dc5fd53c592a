"""On ranks that gather parameters together, calls are compared with stock as well, in as many runs
on each."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.engine import Call
from tests.support.refusals import refused


class ByColumn(nn.Module):
    """A layer that adds something by the column, which replacing documents does not show."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states) + torch.linspace(0, 1, states.shape[1])[None, :, None]


def layer(model):
    model.model.layers[0].mlp = ByColumn(model.model.layers[0].mlp)


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + torch.linspace(0, 1, output.shape[1])[None, :, None]
    )


def backward_hook(model):
    model.model.layers[0].mlp.register_full_backward_hook(
        lambda module, given, out: (given[0] + given[0].mean(1, keepdim=True),)
    )


def nothing(model):
    """The control: an exact model."""


@pytest.fixture
def gathering(monkeypatch):
    """One process in the place of several."""
    monkeypatch.setattr("autopack.calls.hooks.in_a_group", lambda: True)
    monkeypatch.setattr("autopack.calls.hooks.gathering_groups", lambda root: (object(),))


CALL = Call()


@pytest.mark.parametrize(
    ("change", "run", "code"),
    [
        (layer, CALL.packed, "leak-detected"),
        (hook, CALL.packed, "leak-detected"),
        (backward_hook, CALL.packed, "not-exact"),
        (nothing, CALL.packed, ""),
        (layer, CALL.padded, "leak-detected"),
        (nothing, CALL.padded, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_calls_are_compared(change, run, code, gathering):
    model = tiny.build("llama").eval()
    change(model)
    with autopack.enable(model) as handle:
        handle.enabled.padding_read = None
        with refused(code) if code else nullcontext():
            run(model)
        if not code:
            assert (handle.checked.checks, handle.checked.leaks) == (1, 0)
            assert handle.checked.worst < 1e-4

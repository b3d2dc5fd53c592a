"""On ranks that gather parameters together, calls are compared with stock as well, in as many runs on each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS = (5, 9, 7)


class ByColumn(nn.Module):
    """A layer that adds something by the column, which replacing documents does not show."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) + torch.linspace(0, 1, states.shape[1])[None, :, None]


def layer(model: Any) -> None:
    model.model.layers[0].mlp = ByColumn(model.model.layers[0].mlp)


def hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + torch.linspace(0, 1, output.shape[1])[None, :, None]
    )


def backward_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_full_backward_hook(
        lambda module, given, out: (given[0] + given[0].mean(1, keepdim=True),)
    )


def nothing(model: Any) -> None:
    """The control: an exact model."""


@pytest.fixture
def gathering(monkeypatch):
    """One process in the place of several."""
    monkeypatch.setattr("autopack.calls.hooks.gathering_groups", lambda root: (object(),))


def packed(model: Any) -> Any:
    ids = tiny.tokens(model.config, 1, sum(LENGTHS))
    where = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return model(input_ids=ids, position_ids=where, labels=ids)


@pytest.mark.parametrize(
    ("change", "code"),
    [(layer, "leak-detected"), (hook, "leak-detected"), (backward_hook, "not-exact"), (nothing, "")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_packed_rows(change, code, gathering):
    model = tiny.build("llama").eval()
    change(model)
    with autopack.enable(model) as handle:
        if code:
            with refused(code):
                packed(model)
        else:
            packed(model)
            assert (handle.checked.checks, handle.checked.leaks) == (1, 0)
            assert handle.checked.worst < 1e-4


@pytest.mark.parametrize("change", [layer, nothing])
def test_padded_batches(change, gathering):
    model = tiny.build("llama").eval()
    change(model)
    ids = tiny.tokens(model.config, 2, 9)
    mask = (torch.arange(9) < torch.tensor([[9], [4]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    with autopack.enable(model) as handle:
        handle.enabled.padding_read = None
        if change is layer:
            with refused("leak-detected"):
                model(input_ids=ids, attention_mask=mask, labels=labels)
        else:
            model(input_ids=ids, attention_mask=mask, labels=labels)
            assert (handle.checked.checks, handle.checked.leaks) == (1, 0)

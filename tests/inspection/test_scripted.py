"""Parts that torch.jit has scripted or traced: proven by themselves, as other parts are; refused where they mix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.conftest import positions, token_ids
from tests.support.refusals import refused, refused_by_its_first_call

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
WIDTH = 64
EXACT = 2e-5
"""Of logits of a tiny model in float32: other rows, other order of sums."""


class Mixes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.cumsum(1)


class HoldsItsExample(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = map(int, x.shape)
        return (2 * x.reshape(rows * tokens, width)).reshape(rows, tokens, width)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(0)))


MADE = {"scripted": torch.jit.script, "traced": traced}
SERVED = {name: (made, linear) for name, made in MADE.items()}
REFUSED = {
    "scripted, mixing": (torch.jit.script, Mixes),
    "traced, mixing": (traced, Mixes),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_one_of_each_token_is_served(name, later):
    made, module = SERVED[name]
    model = tiny.build("llama").eval()
    part = made(module())
    if not later:
        model.model.norm = part
    handle = autopack.enable(model)
    model.model.norm = part
    ids = token_ids(1, 9)
    found = model(input_ids=ids, position_ids=positions([4, 5])).logits
    found.square().mean().backward()
    gradient = next(part.parameters()).grad.clone()
    handle.remove()
    assert "its calls are checked closely" in handle.verified
    assert handle.checked.checks
    part.zero_grad()
    expected = torch.cat([model(piece, use_cache=False).logits for piece in (ids[:, :4], ids[:, 4:])], 1)
    expected.square().mean().backward()
    assert float((found - expected).abs().max()) < EXACT * float(expected.std())
    assert float((gradient - next(part.parameters()).grad).abs().max()) < EXACT * float(gradient.abs().max())


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_and_left_as_they_were(name):
    made, module = REFUSED[name]
    model = tiny.build("llama").eval()
    part = model.model.norm = made(module())
    refused_by_its_first_call(model)
    ids = token_ids(1, 7)
    assert model.model.norm is part
    assert model(input_ids=ids).logits.isfinite().all()


@pytest.mark.parametrize("made", MADE)
def test_one_that_comes_later_and_mixes_is_refused_in_packed_rows(made):
    model = tiny.build("llama").eval()
    with autopack.enable(model):
        model.model.norm = MADE[made](Mixes())
        with refused("not-exact", "leak-detected"):
            model(input_ids=token_ids(1, 9), position_ids=positions([4, 5]))

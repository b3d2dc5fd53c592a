"""Parts that torch.jit has scripted or traced, whose code cannot be read: refused by their names, left as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopack
from autopack import UnsupportedModel, tiny
from tests.conftest import positions, token_ids

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
MADE = {"scripted": torch.jit.script, "traced": lambda module: torch.jit.trace(module, torch.randn(1, 4))}
REFUSED = r"model\.norm is a \w+ of torch\.jit.* in its place"


@pytest.mark.parametrize("made", MADE)
def test_it_is_refused_and_left_as_it_was(made):
    model, stock = (tiny.build("llama").eval() for _ in range(2))
    model.model.norm, stock.model.norm = MADE[made](nn.Identity()), nn.Identity()
    with pytest.raises(UnsupportedModel, match=REFUSED):
        autopack.enable(model)
    ids = token_ids(1, 9)
    torch.testing.assert_close(model(input_ids=ids).logits, stock(input_ids=ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("made", MADE)
def test_one_that_comes_later_is_refused_in_packed_rows(made):
    model = tiny.build("llama").eval()
    with autopack.enable(model):
        model.model.norm = MADE[made](nn.Identity())
        with pytest.raises(UnsupportedModel, match=REFUSED):
            model(input_ids=token_ids(1, 9), position_ids=positions([4, 5]))

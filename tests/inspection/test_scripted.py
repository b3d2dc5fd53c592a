"""Parts that torch.jit has scripted or traced: proven by themselves, as other parts are; refused
where they mix."""

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.conftest import token_ids
from tests.engine import Call, check
from tests.subjects import Mixes
from tests.support.refusals import refused, refused_by_its_first_call

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
WIDTH = 64
CALL = Call(given={"use_cache": False})


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def traced(module):
    return torch.jit.trace(
        module, torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    )


MADE = pytest.mark.parametrize("made", [torch.jit.script, traced], ids=["scripted", "traced"])


@pytest.mark.parametrize("later", [False, True])
@MADE
def test_one_of_each_token_is_served(made, later):
    model, part = tiny.build("llama").eval(), made(linear())
    if not later:
        model.model.norm = part
    with autopack.enable(model) as handle:
        model.model.norm = part
        found = CALL.packed(model)
    assert "its calls are checked closely" in handle.verified
    assert handle.checked.checks
    check(found, CALL.alone(model))


@MADE
def test_one_that_mixes_is_refused_and_left_as_it_was(made):
    model = tiny.build("llama").eval()
    part = made(Mixes())
    with autopack.enable(model):
        model.model.norm = part
        with refused("not-exact", "leak-detected"):
            CALL.packed(model)
    refused_by_its_first_call(model)
    assert model.model.norm is part
    assert model(input_ids=token_ids(1, 7)).logits.isfinite().all()

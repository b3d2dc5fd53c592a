"""torch.compile of attention modules alone, in a model that is not compiled."""

from functools import partial

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import LENGTHS, OTHER_LENGTHS, llama, positions, token_ids
from tests.engine import Call, must_be_exact
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "fresh_dynamo")


def _forward(layer, backend):
    layer.self_attn.forward = torch.compile(layer.self_attn.forward, backend=backend)


def _in_its_place(layer, backend):
    layer.self_attn = torch.compile(layer.self_attn, backend=backend)


def _itself(layer, backend):
    layer.self_attn.compile(backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("compile_attention", [_forward, _in_its_place, _itself])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_attention_keeps_documents_apart(compile_attention, implementation, backend, when):
    def change(model):
        for layer in model.model.layers:
            compile_attention(layer, backend)

    calls = [
        Call(lengths=lengths, given={"use_cache": False}) for lengths in (LENGTHS, OTHER_LENGTHS)
    ]
    rows = tuple(row for call in (*calls, calls[0]) for row in call.row)
    must_be_exact(partial(llama, implementation), rows, change, when)


def test_it_is_stocks_own_code_whose_calls_need_no_checks():
    model = llama()
    with autopack.enable(model) as handle:
        _itself(model.model.layers[0], "eager")
        model(input_ids=token_ids(), position_ids=positions(LENGTHS))
        assert not handle.enabled.is_checked_closely


def _past_its_attention():
    """A compiled forward of other code has to arrive."""
    model = llama()
    attention = model.model.layers[0].self_attn

    def past_it(hidden_states, **others):
        return attention.o_proj(hidden_states.cumsum(1)), None

    attention.forward = torch.compile(past_it, backend="eager")
    return model


def _of_a_mixer():
    """Its own forward is the site, which what was compiled before goes past."""
    model = tiny.build("gptj")
    for block in model.transformer.h:
        block.attn.forward = torch.compile(block.attn.forward, backend="eager")
    return model


@pytest.mark.parametrize("make", [_past_its_attention, _of_a_mixer])
def test_a_compiled_forward_that_goes_past_the_site_is_refused(make):
    with autopack.enable(make(), verify=False) as handle, refused("other-code"):
        handle.model(input_ids=token_ids(), position_ids=positions(LENGTHS))

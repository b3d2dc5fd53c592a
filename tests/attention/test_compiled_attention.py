"""torch.compile of attention modules alone, in a model that is not compiled."""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import (
    FLOAT64,
    LEAK,
    LENGTHS,
    OTHER_LENGTHS,
    alone,
    alone_loss,
    error,
    gradient_error,
    gradients,
    llama,
    positions,
    token_ids,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
IDS = token_ids()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _forward(layer, backend):
    layer.self_attn.forward = torch.compile(layer.self_attn.forward, backend=backend)


def _in_its_place(layer, backend):
    layer.self_attn = torch.compile(layer.self_attn, backend=backend)


def _itself(layer, backend):
    layer.self_attn.compile(backend=backend)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("compile_attention", [_forward, _in_its_place, _itself])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_attention_keeps_documents_apart(compile_attention, implementation, backend, when):
    model, stock = llama(implementation), llama(implementation)
    if when == "before":
        for layer in model.model.layers:
            compile_attention(layer, backend)
    with autopack.enable(model) as handle:
        if when == "after":
            for layer in model.model.layers:
                compile_attention(layer, backend)
        for lengths in (LENGTHS, OTHER_LENGTHS, LENGTHS, (sum(LENGTHS),)):
            found = model(input_ids=IDS, position_ids=positions(lengths), labels=IDS)
            assert error(found.logits, alone(stock, IDS, lengths)) < FLOAT64
        assert not handle.enabled.is_checked_closely
        model(input_ids=IDS, position_ids=positions(LENGTHS), labels=IDS).loss.backward()
    alone_loss(stock, IDS, LENGTHS).backward()
    assert gradient_error(gradients(model), gradients(stock)) < 1e-6  # transformers has the loss in float32
    leaking = stock(input_ids=IDS, position_ids=positions(LENGTHS), attention_mask=torch.ones_like(IDS)).logits
    assert error(leaking, alone(stock, IDS, LENGTHS)) > LEAK


def test_a_compiled_forward_of_other_code_has_to_arrive():
    model = llama()
    attention = model.model.layers[0].self_attn

    def past_it(hidden_states, **others):
        return attention.o_proj(hidden_states.cumsum(1)), None

    attention.forward = torch.compile(past_it, backend="eager")
    with (
        autopack.enable(model, verify=False),
        refused("other-code"),
    ):
        model(input_ids=IDS, position_ids=positions(LENGTHS))


def test_a_compiled_mixer_is_refused():
    """Its own forward is the site, which what was compiled before goes past."""
    model = tiny.build("gptj")
    for block in model.transformer.h:
        block.attn.forward = torch.compile(block.attn.forward, backend="eager")
    with (
        autopack.enable(model, verify=False),
        refused("other-code"),
    ):
        model(input_ids=IDS, position_ids=positions(LENGTHS))

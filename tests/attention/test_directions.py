"""Attention modules whose `is_causal` says another thing than the mask of their model.

Stock SDPA follows the mask where a batch has padding, and `is_causal` where it has none, so that
the documents of a padded batch do not get what they get alone."""

import copy
from functools import partial

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autopack
from autopack import tiny
from tests.engine import WHEN, Call, check, must_be_exact, verdict
from tests.subjects import build
from tests.support.refusals import refused_by_its_first_call

CALL = Call()
TURNED = {
    "llama": False,
    "olmo2": False,
    "qwen2_moe": False,
    "gpt2": False,
    "bert": True,
    "roberta": True,
}
"""Types, and what is said of their modules against their masks."""


def turn(model, causal):
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = causal


def call_of(model_type):
    return CALL if not TURNED[model_type] else Call(shifts=False)


def _build(model_type, **options):
    return build(model_type, "masked-lm" if TURNED[model_type] else "causal-lm", **options)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("model_type", TURNED)
def test_it_is_refused(model_type, when):
    """Stock attends one way alone and the other way beside padding."""
    turned, call = partial(turn, causal=TURNED[model_type]), call_of(model_type)
    found = verdict(partial(_build, model_type), call.both, turned, when)
    assert found.count("[two-directions]") == 2, found


def test_calls_without_several_documents_are_stocks_and_what_is_turned_back_is_exact():
    model, stock = build("llama"), build("llama")
    with autopack.enable(model):
        for which in (model, stock):
            turn(which, False)
        alone = {"input_ids": tiny.tokens(model.config, 1, 5)}
        assert torch.equal(model(**alone).logits, stock(**alone).logits)
        turn(model, True)
        check(CALL.packed(model), CALL.alone(build("llama")))


def test_sdpa_that_is_asked_for_by_name_refuses_it_too():
    model = build("llama", attn_implementation="sdpa")
    turn(model, False)
    assert "[two-directions]" in refused_by_its_first_call(model, backend="sdpa")


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "gpt2", "bert"])
def test_eager_attention_reads_the_mask_alone_and_is_exact(model_type):
    change = partial(turn, causal=TURNED[model_type])
    must_be_exact(
        partial(_build, model_type, attn_implementation="eager"), call_of(model_type).both, change
    )


def _compiled():
    model = build("llama")
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("when", WHEN)
def test_compiled_it_is_refused_or_as_stock(when):
    """A graph that was made before the change follows the mask, as stock does beside padding."""
    found = verdict(_compiled, CALL.both, partial(turn, causal=False), when)
    assert "packed refused: " in found
    assert "is_causal=False" in found


@pytest.mark.parametrize("place", ["one layer", "hook"])
def test_a_part_of_the_model_is_refused_or_exact(place):
    def change(model):
        layers = model.model.layers
        if place == "one layer":
            layers[1].self_attn.is_causal = False
        else:
            layers[0].register_forward_pre_hook(
                lambda layer, args: setattr(layer.self_attn, "is_causal", False)
            )

    for when in WHEN:
        assert "refused" in verdict("llama", CALL.both, change, when)


@pytest.mark.parametrize("when", WHEN)
def test_a_function_that_is_registered_with_the_masks_of_sdpa(when, registered_as_sdpa):
    model = build("llama", attn_implementation=registered_as_sdpa)
    change = partial(turn, causal=False)
    found = verdict(partial(copy.deepcopy, model), CALL.both, change, when)
    assert "is_causal=False" in found
    must_be_exact(partial(copy.deepcopy, model), CALL.both)


@pytest.fixture
def registered_as_sdpa():
    name = "users_sdpa"
    AttentionInterface.register(
        name, lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs)
    )
    AttentionMaskInterface.register(name, sdpa_mask)
    yield name
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        interface._global_mapping.pop(name)

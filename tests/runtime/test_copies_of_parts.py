"""Copies of a part of an enabled model, a layer or a backbone: the part alone, which refuses to
run, and comes clean.

Sizes are those of pickles, since what a copy drags along is in its pickle: marks and hooks take a
few kilobytes, a whole tiny model more than 100."""

import copy
import io
import pickle

import pytest
import torch

import autopack
from autopack import tiny
from autopack.runtime.marks import holds_marks
from autopack.runtime.scope import BoundCheckpoint
from tests.conftest import FLOAT64, LEAK, LENGTHS, attributes, error, positions, spans, token_ids
from tests.subjects import layers_of
from tests.support.refusals import refused

IDS, WHERE = token_ids(), positions(LENGTHS)
TYPES = [
    "llama",
    "gpt2",
    "bert",
    "mamba",
    "mamba2",
    "bloom",
    "falcon",
    "gemma3_text",
    "rwkv",
    "qwen2_moe",
]
NOTES = 20_000
"""Bytes that marks and hooks may take in a pickle."""


def through_torch(part):
    buffer = io.BytesIO()
    torch.save(part, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda part: pickle.loads(pickle.dumps(part)),
    "torch": through_torch,
}


every_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


def first_layer(model):
    return layers_of(model)[0]


def build(model_type):
    return tiny.build(model_type).double()


def states(backbone):
    ones = torch.ones_like(IDS)  # with a mask and positions that restart, stock leaks
    return backbone(
        input_ids=IDS, position_ids=WHERE, attention_mask=ones, use_cache=False
    ).last_hidden_state


def states_alone(backbone):
    return torch.cat(
        [backbone(IDS[:, a:b], use_cache=False).last_hidden_state for a, b in spans(LENGTHS)], dim=1
    )


@pytest.mark.parametrize("model_type", TYPES)
def test_a_part_is_saved_without_its_model(model_type):
    stock, model = build(model_type), build(model_type)
    autopack.enable(model, verify=False)
    for part in (
        lambda m: m.base_model,
        first_layer,
        lambda m: m.base_model.get_input_embeddings(),
    ):
        assert len(pickle.dumps(part(model))) <= len(pickle.dumps(part(stock))) + NOTES
    # what it would have brought along
    assert len(pickle.dumps(model)) > len(pickle.dumps(first_layer(model))) + NOTES
    autopack.disable(model)


@every_copy
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "mamba", "bloom"])
def test_a_copied_backbone_refuses_and_can_be_disabled_or_enabled(model_type, duplicate):
    stock, model = build(model_type), build(model_type)
    expected, row = states_alone(stock.base_model), IDS[:, :5]
    before = attributes(model.base_model).keys()
    autopack.enable(model, verify=False)
    part, other = duplicate(model.base_model), duplicate(model.base_model)
    for given in ({"input_ids": IDS, "position_ids": WHERE}, {"input_ids": row}):
        with refused("copied-part"):
            part(**given)
    assert not autopack.is_enabled(part)
    autopack.disable(part)
    assert not holds_marks(part)
    assert torch.equal(part(row).last_hidden_state, stock.base_model(row).last_hidden_state)
    assert attributes(part).keys() == before
    assert error(states(part), expected) > LEAK
    with autopack.enable(other, verify=False) as handle:
        assert handle.model is other
        assert error(states(other), expected) <= FLOAT64
    assert attributes(other).keys() == before
    # nothing of the original was touched
    assert error(states(model.base_model), expected) <= FLOAT64
    autopack.disable(model)


@every_copy
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "mamba"])
def test_a_copied_layer_refuses_and_can_be_disabled(model_type, duplicate):
    stock, model = build(model_type), build(model_type)
    states = stock.base_model.get_input_embeddings()(IDS)
    with autopack.enable(model, verify=False):
        layer = duplicate(first_layer(model))
        with refused("copied-part"):
            layer(states)
        autopack.disable(layer)
        found, wanted = (each(states) for each in (layer, first_layer(stock)))
        assert torch.equal(
            *(out if isinstance(out, torch.Tensor) else out[0] for out in (found, wanted))
        )


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mamba"])
def test_layers_copied_back_into_their_model_are_served_from_the_next_call_on(model_type):
    stock, model = build(model_type), build(model_type)

    def deepen(one):
        layers = layers_of(one)
        layers[1] = copy.deepcopy(layers[0])

    model.gradient_checkpointing_enable({"use_reentrant": False})
    autopack.enable(model, verify=False)
    model.train()(input_ids=IDS, position_ids=WHERE)
    deepen(stock), deepen(model)
    expected = states_alone(stock.base_model)
    assert error(states(model.eval().base_model), expected) <= FLOAT64
    autopack.disable(model)
    assert not holds_marks(model)
    assert not any(
        isinstance(v, BoundCheckpoint) for m in model.modules() for v in vars(m).values()
    )
    assert error(states(model.base_model), expected) > LEAK


def test_rotations_and_poolers_of_a_part_are_served_where_they_are_put_into_a_model():
    """They stand in no entry: left alone, they would follow the row and not its documents."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    for model, name in (
        (tiny.build("llama", rope_parameters=rope, max_position_embeddings=8), "rotary_emb"),
        (tiny.build("bert", task="next-sentence-prediction"), "pooler"),
    ):
        with autopack.enable(model, verify=False):
            backbone = model.base_model
            before = backbone(input_ids=IDS, position_ids=WHERE)
            setattr(backbone, name, copy.deepcopy(getattr(backbone, name)))
            after = backbone(input_ids=IDS, position_ids=WHERE)
            assert torch.equal(after[0], before[0])
            assert name != "pooler" or torch.equal(after.pooler_output, before.pooler_output)

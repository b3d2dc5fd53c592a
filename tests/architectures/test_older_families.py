"""What a family says of a type, where an older release has code of another form under the same
name."""

import copy
from types import SimpleNamespace

import pytest
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaPreTrainedModel

import autopack
from autopack import registry, tiny
from autopack.inspection import modules, source
from autopack.inspection.configs import text_config
from autopack.mixers import Alone
from autopack.registry import Family
from tests.conftest import FLOAT64, alone, error, positions, token_ids
from tests.inspection.test_older_code import ROWS, Rotating, build


@pytest.fixture
def of_attention():
    """A family that knows the attention by its newest form, which cuts no table of rotations
    (Falcon)."""
    family = Family("falcons", frozenset({"old"}), "alone", mixers={"OldAttention": Alone()})
    registry.register(family)
    yield family
    registry._registered.remove(family)


def test_rotations_that_an_older_release_cuts_restart_at_every_document(of_attention):
    """Those of a batch that is padded to the left begin behind 0, where the table of a document
    alone has no row."""
    model = build(Rotating)
    ids, behind = token_ids(len(ROWS), sum(ROWS[0]), 0), positions(*ROWS) + 3
    expected = alone(model, ids, *ROWS)
    assert registry.look_up(model)[0].mixers["OldAttention"].from_zero
    assert not of_attention.mixers["OldAttention"].from_zero
    with autopack.enable(model):
        assert error(model(input_ids=ids, position_ids=behind).logits, expected) < FLOAT64


def test_without_a_look_at_the_code_cut_rotations_raise(of_attention, monkeypatch):
    monkeypatch.setattr(source, "cuts_rotations", lambda cls: False)
    model = build(Rotating)
    with autopack.enable(model), pytest.raises(IndexError):
        model(input_ids=token_ids(len(ROWS), sum(ROWS[0]), 0), position_ids=positions(*ROWS) + 3)


class WantsKernels(LlamaForCausalLM):
    """Insists on kernels of a GPU unless it is told not to, as Jamba and Zamba do up to
    transformers 4."""

    def __init__(self, config):
        super().__init__(config)
        self.use_fast_kernels = True

    def forward(self, *args, **kwargs):
        if self.use_fast_kernels:
            raise ValueError(
                "Fast kernels are not available. Make sure that the model is on a CUDA device."
            )
        return super().forward(*args, **kwargs)


class WantsKernelsByAnotherName(WantsKernels):
    """Insists on them whatever the flag says."""

    def forward(self, *args, **kwargs):
        self.use_fast_kernels = True
        return super().forward(*args, **kwargs)


def test_a_twin_runs_without_the_kernels_that_its_class_insists_on():
    model = WantsKernels(tiny.config("llama"))
    with autopack.enable(model) as handle:
        assert handle.enabled.proof.source == "twin"
        assert model.use_fast_kernels
    with autopack.enable(WantsKernelsByAnotherName(tiny.config("llama"))) as handle:
        assert "Fast kernels are not available" in handle.verified
        assert handle.enabled.proof.source == "checks"


class Layers(LlamaPreTrainedModel):
    """Layers that are a model by themselves, which takes hidden states, as DeBERTa's encoder was in
    4.47 to 4.50."""

    def __init__(self, config):
        super().__init__(config)
        self.attention = LlamaAttention(config, 0)

    def forward(self, hidden_states, attention_mask=None):
        return self.attention(hidden_states, attention_mask=attention_mask)


class Whole(LlamaPreTrainedModel):
    def __init__(self, config, of_layers):
        super().__init__(config)
        self.layers = Layers(of_layers)

    def forward(self, input_ids):
        return self.layers(input_ids)


def test_layers_that_are_a_model_are_none_of_a_tower():
    config = tiny.config("llama")
    inside, tower = Whole(config, config), Whole(config, copy.deepcopy(config))
    assert modules.attention_modules(inside) == [inside.layers.attention]
    assert modules.towers(inside) == modules.attention_modules(tower) == []
    assert modules.towers(tower) == [tower.layers.attention]


class OfOneWord:
    """A configuration of transformers 4.45 to 4.53: its `get_text_config` knows the decoder
    alone."""

    def get_text_config(self, decoder=False):
        return SimpleNamespace(decoder=decoder)


class OfNoMethod:
    """One of transformers 4.44, which has a part and no way to ask for it."""

    def __init__(self, **parts):
        vars(self).update(parts)


def test_the_text_part_of_older_configurations():
    assert text_config(OfOneWord(), decoder=True).decoder
    assert not text_config(OfOneWord(), encoder=True).decoder
    part, whole = OfNoMethod(model_type="llama"), OfNoMethod(text_config={"a": 1})
    assert text_config(OfNoMethod(text_config=part), decoder=True) is part
    assert text_config(whole) is whole

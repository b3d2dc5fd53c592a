"""Words of configurations."""

import functools

import pytest
import torch
from transformers import LlamaConfig

import autopack
from autopack import tiny
from autopack.proving import configuration


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sliding_window", None, {"none"}),
        ("sliding_window", 4096, {"2+"}),
        ("softcap", 30.0, {"+"}),
        ("flag", True, {"true"}),
        ("layer_types", ["a", "b", "b"], {"^a", "a|b", "a>b"}),
        ("no_rope_layers", [1, 0], {"^1", "0|1", "1>0"}),
        ("attn_layer_indices", [9, 18], {"[...]"}),
        ("hidden_size", 4096, {"set"}),
        ("first_k_dense_replace", 0, {"0"}),
    ],
)
def test_words(field, value, words):
    config = LlamaConfig()
    setattr(config, field, value)
    assert configuration.describe(config)["llama"][field] == words


def test_neutral_fields_have_no_words():
    config = LlamaConfig(
        attention_dropout=0.5,
        eos_token_id=[7, 8],
        rms_norm_eps=0.1,
        hidden_act="relu",
        use_cache=False,
    )
    assert configuration.describe(config) == configuration.describe(LlamaConfig())


def test_parts_stand_under_their_own_type():
    words = configuration.describe(tiny.config("llava", task="image-text-to-text"))
    assert words["llava"]["text_config"] == {"llama"}
    assert "rope_parameters.rope_type" in words["llama"]


@pytest.mark.parametrize("dims", [(1, 2), (1,)])
def test_a_function_that_its_class_does_not_put_there_is_proven_by_no_twin(dims):
    """FNet's transform is a function of torch with options, put on its modules by a method."""
    model = tiny.build("fnet", task="masked-lm")
    transform = functools.partial(torch.fft.fftn, dim=dims)
    model.fnet.encoder.layer[0].fourier.self.fourier_transform = transform
    with autopack.enable(model) as handle:
        assert handle.enabled.is_checked_closely == (dims != (1, 2))

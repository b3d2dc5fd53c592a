"""Other configurations: ordinary ones of stock types are exact, and what is changed later is
followed or refused."""

import copy

import pytest
from transformers import LlamaForCausalLM

import autopack
from tests.conftest import FLOAT64, LENGTHS, alone, error, llama, positions, token_ids
from tests.engine import WHEN, Call, errors
from tests.subjects import build, crossed, layers_of
from tests.support.refusals import refused
from tests.unfamiliar.parts import mixer_name
from tests.unfamiliar.properties import Property, table

CALL = Call()
ROPE = {"rope_theta": 10000.0}
SHORT = 6
"""Positions that a model was made for: between the lengths of documents (5, 7, 4), and less than a
row."""
HALF = [1.0] * 8
ORDINARY = [
    ("llama", {"num_key_value_heads": 4, "head_dim": 8, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": 3}),
    ("recurrent_gemma", {"block_types": ["attention", "recurrent"]}),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}),
    ("llama4_text", {"attention_chunk_size": 4}),
    ("llama4_text", {"attn_temperature_tuning": True, "floor_scale": 3, "attn_scale": 0.5}),
    ("mamba2", {"chunk_size": 3, "conv_kernel": 3, "use_bias": True}),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 3}),
]
"""Single fields of every type are changed by `compat.variants`, and by the fuzz."""
UNUSUAL = [
    ("falcon", {"alibi": True}),
    ("phi3", {
        "rope_parameters": {**ROPE, "rope_type": "longrope", "short_factor": HALF, "long_factor": [3.0] * 8,
                            "original_max_position_embeddings": SHORT},
        "max_position_embeddings": 24, "original_max_position_embeddings": SHORT,
    }),
    ("llama", {"max_position_embeddings": SHORT}),
    ("gpt2", {"n_positions": 8}),
    ("mpt", {"max_seq_len": 8}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}),
]  # fmt: skip
"""Tables of positions are shorter than the row, though not than its documents."""


def with_fields(model_type, fields):
    return build(model_type, **fields)


def in_config(**fields):
    def change(model):
        for name, value in fields.items():
            setattr(model.config, name, value)

    return change


def in_mixers(**fields):
    def change(model):
        for layer in layers_of(model):
            for name, value in fields.items():
                setattr(getattr(layer, mixer_name(layer)), name, value)

    return change


def both_directions(model):
    """What makes an encoder of a decoder: its mask and its modules say so alike."""
    in_config(is_causal=False)(model)
    in_mixers(is_causal=False)(model)


def rotary(**fields):
    """Other rotary positions, by the module of the model's own class for another configuration."""

    def change(model):
        model.config.rope_parameters = {**ROPE, **fields}
        model.config.max_position_embeddings = SHORT
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).double()

    return change


CHANGED = {
    "window of the config": ("mistral", in_config(sliding_window=2)),
    "window taken away": ("mistral", in_config(sliding_window=None)),
    "window of the modules": ("mistral", in_mixers(sliding_window=2)),
    "kinds of layers": ("gemma3_text", in_config(layer_types=["full_attention", "full_attention"])),
    "softcap of the modules": ("gemma2", in_mixers(attn_logit_softcapping=1.0)),
    "causal no more": ("llama", in_mixers(is_causal=False)),
    "chunks of the config": ("llama4_text", in_config(attention_chunk_size=3)),
    "temperature of llama4": (
        "llama4_text",
        in_mixers(attn_temperature_tuning=True, floor_scale=2, attn_scale=0.9),
    ),
    "linear rope": ("llama", rotary(rope_type="linear", factor=4.0)),
    "dynamic rope": ("llama", rotary(rope_type="dynamic", factor=4.0)),
    "chunks of mamba2": ("mamba2", in_mixers(chunk_size=3)),
    "model type": ("llama", in_config(model_type="opt")),
}


def changing(model_type, *_):
    return build(model_type, **({"attn_implementation": "eager"} if model_type == "gemma2" else {}))


HARMLESS = {
    "eager": lambda model: model.set_attn_implementation("eager"),
    "hidden states": in_config(output_hidden_states=True),
    "another padding token": in_config(pad_token_id=5),
    "an encoder of it": both_directions,
}


EVERY_DAY = crossed(list(HARMLESS), ["llama", "gemma3_text", "gpt2", "opt", "phi", "gpt_neox"])


@table([
    Property("ordinary", ORDINARY, make=with_fields, exact=WHEN, usual=1),
    # No control: stock cannot run a row that is longer than its table of positions.
    Property("unusual", UNUSUAL, None, ((CALL.packed, CALL.alone), *CALL.batch), make=with_fields),
    Property("changed", [(of, name, when) for name, (of, _) in CHANGED.items() for when in WHEN],
             lambda model, name: CHANGED[name][1](model), make=changing),
    Property("switched every day", [(of, name, when) for name, of in EVERY_DAY for when in WHEN],
             lambda model, name: HARMLESS[name](model), exact=WHEN),
])  # fmt: skip
def test_a_configuration(subject, case):
    subject.hold(*case)


@pytest.mark.parametrize("name", [name for name in CHANGED if name != "model type"])
def test_the_changes_show(name):
    """The control: what a change of the configuration does to stock is seen, or stock itself does
    not read it."""
    model_type, change = CHANGED[name]
    model = changing(model_type)
    before = CALL.alone(model)
    change(model)
    moved = errors(CALL.alone(model), before)["states"]
    unread = ("window of the modules", "causal no more", "chunks of mamba2", "kinds of layers")
    assert moved > 1e-3 or name.startswith(unread), moved


class LlamaThatMayMix(LlamaForCausalLM):
    """Takes from the token before where its configuration says so, which it does not when it is
    enabled."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        config = self.config
        if (
            config.mixes
            or config.rules["how"]["mixes"]
            or config.mixers[1:]
            or getattr(config, "new", False)
        ):
            output.logits = output.logits + output.logits.roll(1, dims=1)
        return output


MIXES = {
    "a field": (
        lambda config: setattr(config, "mixes", True),
        lambda config: setattr(config, "mixes", False),
    ),
    "a new field": (
        lambda config: setattr(config, "new", True),
        lambda config: delattr(config, "new"),
    ),
    "inside a dict": (
        lambda config: config.rules["how"].update(mixes=True),
        lambda config: config.rules["how"].update(mixes=False),
    ),
    "inside a list": (
        lambda config: config.mixers.append("all"),
        lambda config: config.mixers.pop(),
    ),
}


@pytest.mark.parametrize("name", MIXES)
def test_a_field_that_is_changed_later_is_noticed(name):
    model, (mix, mix_no_more) = (
        LlamaThatMayMix(copy.deepcopy(llama().config)).double().eval(),
        MIXES[name],
    )
    for field, value in {
        "mixes": False,
        "rules": {"how": {"mixes": False}},
        "mixers": ["none"],
    }.items():
        setattr(model.config, field, value)
    ids, where = token_ids(), positions(LENGTHS)
    with autopack.enable(model):
        model(input_ids=ids, position_ids=where)
        mix(model.config)
        with refused("not-exact"):
            model(input_ids=ids, position_ids=where)
        mix_no_more(model.config)
        assert (
            error(model(input_ids=ids, position_ids=where).logits, alone(model, ids, LENGTHS))
            <= FLOAT64
        )

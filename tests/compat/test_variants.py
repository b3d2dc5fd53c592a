"""Variants of tiny configurations: each changes the field that it names."""

import pytest

from autopack import tiny
from compat.variants import variants

SAMPLE = [
    "llama",
    "gemma2",
    "inkling_text",
    "gpt2",
    "bert",
    "modernbert",
    "mamba2",
    "reformer",
    "llama4_text",
    "qwen3",
]


def all_variants(model_type):
    task = "causal-lm" if model_type in tiny.types_for("causal-lm") else "masked-lm"
    whole = tiny.config(model_type, task=task)
    return task, list(variants(tiny.build(model_type, task=task), whole))


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_variant_changes_the_field_that_it_names(model_type):
    task, found = all_variants(model_type)
    present = tiny.config(model_type, task=task)
    built = 0
    for variant in found:
        try:
            changed = tiny.config(model_type, task=task, **variant.overrides())
        except tiny.CannotBuild:
            continue  # the class refuses the value
        built += 1
        if variant.field not in ("num_labels", "head_dim"):
            assert str(changed) != str(present), variant.name
    assert built >= 6
    assert len({variant.name for variant in found}) == len(found)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", ["attention_bias=True", "rope_parameters=yarn", (
                                                                      "rope_parameters=dynamic, "
                                                                      "max_position_embeddings=8"
                                                                  ),
                   "max_position_embeddings=16", "pad_token_id=None"]),
        ("gemma2", ["attn_logit_softcapping=None", (
                                                       "layer_types=['full_attention', "
                                                       "'full_attention']"
                                                   ),
                    "sliding_window=1", "query_pre_attn_scalar=None"]),
        ("inkling_text", ["log_scaling_n_floor=None", "shared_expert_sink=False"]),
        ("gpt2", ["reorder_and_upcast_attn=True"]),
        ("reformer", ["lsh_attn_chunk_length=3", "hash_seed=None", (
                                                                       "attn_layers=['lsh', "
                                                                       "'lsh'], num_hidden_layers=2"
                                                                   )]),
    ],
)  # fmt: skip
def test_what_is_tried(model_type, names):
    found = {variant.name for variant in all_variants(model_type)[1]}
    missing = {f"{model_type}.{name}" for name in names} - found
    assert not missing - {"gemma2.query_pre_attn_scalar=None"}

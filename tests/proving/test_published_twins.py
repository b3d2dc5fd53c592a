"""Twins of configurations as they are published, at full size on the meta device."""

import pytest

import autopack
from autopack.proving import twin
from autopack.proving.apart import apart
from compat.published import PUBLISHED, absent, build

# What each of them has that a tiny model of its type has not by itself.
SIZED = {
    "Qwen3 30B-A3B": "head_dim",
    "StarCoder2 3B": "sliding_window",
    "Phi-3 mini 4k": "sliding_window",
    "OPT 350M": "word_embed_proj_dim",
    "ELECTRA small generator": "embedding_size",
    "Mamba 130M": "n_layer",
    "Codestral Mamba 7B": "intermediate_size",
    "LFM2 1.2B": "num_heads",
}


@pytest.mark.parametrize("name", [*SIZED, "Phi-4 mini", "MPT 7B"])
def test_they_have_one_of_the_same_words_and_modules(name):
    if absent(name):
        pytest.skip("not in this release")
    model = build(name)
    found = apart(lambda: twin.of(model))
    assert not found.others
    if name in SIZED:
        assert vars(found.model.config)[SIZED[name]] < vars(model.config)[SIZED[name]]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PUBLISHED)
def test_each_is_enabled_by_the_default_call(name):
    if absent(name):
        pytest.skip("not in this release")
    assert autopack.enable(build(name)).enabled.proof.source in ("twin", "part")

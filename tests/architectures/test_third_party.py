"""A family from elsewhere: a model with a recurrence of its own, served by what is public alone."""

import pytest
import torch

import autopack
from autopack import registry
from tests.architectures.test_one_file import (
    WARMING,
    FadingConfig,
    FadingForCausalLM,
    WarmingConfig,
    WarmingForCausalLM,
)
from tests.engine import Call, must_be_exact
from tests.support.refusals import refused

MODULE = """
from autopack.registry import Family
from autopack.mixers import ROWS

FAMILY = Family(
    name="toys",
    model_types=frozenset({"fading"}),
    how="recurrence on documents as rows",
    mixers={"FadingMixer": ROWS},
    attends=False,
)
"""
"""All that a package of one's own has to hold."""


def toy(kind=FadingForCausalLM, config=FadingConfig, **fields):
    torch.manual_seed(0)
    return kind(config(vocab_size=128, hidden_size=16, **fields)).double().eval()


def register(text):
    names = {}
    exec(text, names)
    autopack.registry.register(names["FAMILY"])


def check():
    """Exact in all call modes, after an audit on enable; what stock gives leaks."""
    call = Call(labels=None, form="segments")
    must_be_exact(toy, (*call.row, (Call(labels=None, form="position_ids").packed, call.alone)))
    with autopack.enable(toy()) as handle:
        assert "on a tiny copy of " in str(handle)
        assert autopack.audit(handle.model).exact


def test_registered_by_a_call(monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    with refused("cannot-be-packed", match="no place to keep documents apart"):
        autopack.enable(toy())
    register(MODULE)
    check()


def test_a_way_too_little_is_found_by_the_audit(monkeypatch):
    """Without its adjustment the family leaks, and enable says so instead of training on it."""
    monkeypatch.setattr(registry, "_registered", [])
    register(WARMING.replace('adjustments={"WarmingAttention": _warmth_of_position},', ""))
    sizes = {"num_attention_heads": 2, "max_position_embeddings": 64, "columns_per_degree": 3}
    with refused("not-exact"):
        autopack.enable(toy(WarmingForCausalLM, WarmingConfig, **sizes))


def test_what_is_registered_by_a_call_is_a_family():
    with pytest.raises(TypeError, match=r"takes an autopack\.registry\.Family; found str"):
        autopack.registry.register("toy")

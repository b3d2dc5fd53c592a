"""What a twin has shown is kept, for as long as nothing that it depends on is another one, and no longer."""

import dataclasses

import pytest
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import autopack
from autopack import registry, tiny
from autopack.enabling import by_twin
from tests.support.refusals import refused

FIELDS = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}


class Mine(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.fixture
def made(monkeypatch):
    """The classes of which twins have been made."""
    found = []
    of = by_twin.twins.of
    monkeypatch.setattr(by_twin.twins, "of", lambda model, *given: found.append(type(model)) or of(model, *given))
    return found


def verified(model):
    with autopack.enable(model) as handle:
        return handle.verified


def test_the_second_model_of_a_process_needs_no_twin(made):
    first = verified(tiny.build("llama", **FIELDS))
    twins = len(made)
    assert twins >= 1
    assert "by a twin of" in first
    assert verified(tiny.build("llama", **FIELDS)) == first
    assert len(made) == twins


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"hidden_act": "relu"},
        {"intermediate_size": 48},
        {"attn_implementation": "sdpa"},
        {"rope_parameters": {**FIELDS["rope_parameters"], "factor": 4.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_configuration_is_another_question(made, change):
    fields = {"attn_implementation": "eager", **FIELDS}
    verified(tiny.build("llama", **fields))
    twins = len(made)
    verified(tiny.build("llama", **{**fields, **change}))
    assert len(made) > twins


def test_code_of_the_user_is_asked_every_time(made):
    for _ in range(2):
        verified(Mine(tiny.config("llama")))
    assert made.count(Mine) >= 2


def test_a_function_that_was_replaced_in_memory_is_not_what_was_asked_about(monkeypatch):
    verified(tiny.build("llama", **FIELDS))
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x + x.mean(1, keepdim=True)))
    with refused("not-exact"):
        autopack.enable(tiny.build("llama", **FIELDS))


def test_an_attribute_of_a_class_of_the_users_is_asked_about(made, monkeypatch):
    """Its functions are all the library's, and may read it."""

    class Named(LlamaForCausalLM):
        loss_type = "ForCausalLM"

    verified(Named(tiny.config("llama")))
    known = len(made)
    verified(Named(tiny.config("llama")))
    assert len(made) == known
    monkeypatch.setattr(Named, "loss_type", "ForMaskedLM")
    verified(Named(tiny.config("llama")))
    assert len(made) > known


def test_a_loss_on_the_instance_is_asked_about(made):
    verified(tiny.build("llama", **FIELDS))
    twins = len(made)
    model = tiny.build("llama", **FIELDS)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.mean() + 0 * labels.sum()
    verified(model)
    assert len(made) > twins


def test_a_family_that_is_registered_later_is_asked_about(made, monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    verified(tiny.build("llama", **FIELDS))
    twins = len(made)
    known = registry.look_up(tiny.build("llama", **FIELDS))[0]
    monkeypatch.setattr(registry, "_registered", [dataclasses.replace(known, name="mine")])
    verified(tiny.build("llama", **FIELDS))
    assert len(made) > twins

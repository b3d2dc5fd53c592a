"""What a twin has shown is kept for as long as nothing that it depends on is another one."""

import dataclasses

import pytest
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import autopack
from autopack import registry, tiny
from autopack.enabling import by_twin
from tests.proving.untouched import Mine
from tests.support.refusals import refused

FIELDS = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}


@pytest.fixture
def made(monkeypatch):
    """The classes of which twins have been made."""
    found = []
    of = by_twin.twins.of
    monkeypatch.setattr(
        by_twin.twins, "of", lambda model, *given: found.append(type(model)) or of(model, *given)
    )
    return found


@pytest.fixture
def asks(made):
    """Whether a twin is made for a model that is enabled."""

    def asked(model):
        before = len(made)
        with autopack.enable(model) as handle:
            assert "on a tiny copy of" in handle.verified
        return len(made) > before

    return asked


def llama(**fields):
    return tiny.build("llama", **FIELDS | fields)


def test_the_second_model_of_a_process_needs_no_twin(asks):
    assert asks(llama())
    assert not asks(llama())


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
def test_another_configuration_is_another_question(asks, change):
    fields = {"attn_implementation": "eager"}
    asks(llama(**fields))
    assert asks(llama(**fields | change))


def test_code_of_the_user_is_asked_every_time(made, asks):
    for _ in range(2):
        asks(Mine(tiny.config("llama")))
    assert made.count(Mine) >= 2


def test_a_function_that_was_replaced_in_memory_is_not_what_was_asked_about(asks, monkeypatch):
    asks(llama())
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP,
        "forward",
        lambda self, x: forward(self, x + x.mean(1, keepdim=True)),
    )
    with refused("not-exact"):
        autopack.enable(llama())


def test_an_attribute_of_a_class_of_the_users_is_asked_about(asks, monkeypatch):
    """Its functions are all the library's, and may read it: no answer about it is kept."""

    class Named(LlamaForCausalLM):
        loss_type = "ForCausalLM"

    asks(Named(tiny.config("llama")))
    monkeypatch.setattr(Named, "loss_type", "ForMaskedLM")
    assert asks(Named(tiny.config("llama")))


def test_a_loss_on_the_instance_is_asked_about(asks):
    asks(llama())
    model = llama()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.mean() + 0 * labels.sum()
    assert asks(model)


def test_a_family_that_is_registered_later_is_asked_about(asks, monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    asks(llama())
    known = registry.look_up(llama())[0]
    monkeypatch.setattr(registry, "_registered", [dataclasses.replace(known, name="mine")])
    assert asks(llama())

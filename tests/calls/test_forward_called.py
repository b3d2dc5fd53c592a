"""`model.forward(...)` of an enabled model is `model(...)`, at the model and at its backbone."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import autopack
from autopack import tiny
from autopack.calls import hooks
from tests.conftest import FLOAT64, LENGTHS, alone, error, llama, positions, spans, token_ids
from tests.support.padded import PADDED, batch, logit_error, mask_of, tally_of
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
IDS = token_ids()
WHERE = positions(LENGTHS)
TYPES = ["llama", "gpt2", "mamba", "bloom", "qwen3_moe", "bert", "recurrent_gemma", "opt"]


def _built(model_type):
    try:
        return tiny.build(model_type, attn_implementation="sdpa")
    except ValueError:
        return tiny.build(model_type)


@pytest.mark.parametrize("model_type", TYPES)
def test_packed_rows_and_padded_batches(model_type):
    model = _built(model_type)
    ids, inputs = tiny.tokens(model.config, 1, sum(LENGTHS)), batch("causal LM", mask_of(PADDED))
    stock = model(**inputs, use_cache=False)
    with autopack.enable(model):
        packed, padded = ({"input_ids": ids, "position_ids": WHERE}, {**inputs, "use_cache": False})
        assert torch.equal(model.forward(**packed).logits, model(**packed).logits)
        assert torch.equal(model.forward(ids, position_ids=WHERE)[0], model(**packed).logits)
        found = model.forward(**padded)
        assert logit_error(found.logits, stock.logits, inputs["attention_mask"]) < 1e-4
        assert tally_of(model).batches == 1 or tally_of(model).left


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_documents_of_the_backbone(implementation):
    model, stock = llama(implementation), llama(implementation)
    with autopack.enable(model):
        found = model.model.forward(input_ids=IDS, position_ids=WHERE).last_hidden_state
    expected = [stock.model(input_ids=IDS[:, a:b]).last_hidden_state for a, b in spans(LENGTHS)]
    assert error(found, torch.cat(expected, 1)) < FLOAT64


def test_an_encoder_decoder_and_its_halves():
    model = tiny.build("t5", task="seq2seq")
    ids = tiny.tokens(model.config, 3, 9)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :5].contiguous()}
    expected = model(**call).loss
    with autopack.enable(model):
        assert float(abs(model.forward(**call).loss - expected)) < 1e-5
        encoded = model.get_encoder().forward(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.isfinite(encoded).all()


def test_gradients_and_checkpointing():
    model, stock = llama().train(), llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with autopack.enable(model):
        model.forward(input_ids=IDS, position_ids=WHERE).logits.pow(2).sum().backward()
    alone(stock, IDS, LENGTHS).pow(2).sum().backward()
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert error(found.grad, expected.grad) < 10 * FLOAT64


def test_the_signature_and_the_function_are_those_of_stock():
    model = llama()
    before, function = inspect.signature(model.forward), type(model).forward
    with autopack.enable(model):
        assert inspect.signature(model.forward) == before
        assert "forward" not in vars(model)
    assert type(model).forward is function


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied):
    model = llama()
    autopack.enable(model)
    other = copied(model)
    expected = alone(llama(), IDS, LENGTHS)
    assert error(other.forward(input_ids=IDS, position_ids=WHERE).logits, expected) < FLOAT64
    autopack.disable(model)
    assert error(other.forward(input_ids=IDS, position_ids=WHERE).logits, expected) < FLOAT64
    autopack.disable(other)


def test_a_copy_that_nobody_has_called_raises_rather_than_leaks():
    """Its sites come with its first call, so its forward is that of stock."""
    model = llama()
    autopack.enable(model)
    other = copy.deepcopy(model).model
    autopack.disable(model)
    with refused("past-the-entry"):
        other.forward(input_ids=IDS, position_ids=WHERE)


def test_other_models_of_the_class_are_not_concerned():
    model, other = llama(), llama()
    call = {"input_ids": IDS, "position_ids": WHERE}
    expected = other.forward(**call).logits
    with autopack.enable(model):
        assert torch.equal(other.forward(**call).logits, expected)


def test_the_forward_of_a_subclass_is_run_once_or_refused():
    """What it does before and after its own class's forward must not be done twice."""

    class Doubling(type(llama())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model, stock = llama(), llama()
    model.__class__ = stock.__class__ = Doubling
    with autopack.enable(model):
        assert error(model(input_ids=IDS, position_ids=WHERE).logits, alone(stock, IDS, LENGTHS)) < FLOAT64
        with refused("past-the-entry"):
            model.forward(input_ids=IDS, position_ids=WHERE)


def test_a_class_that_is_patched_meanwhile_is_left_to_the_newcomer():
    model, stock = llama(), llama()
    cls, before = type(model), type(model).forward
    try:
        with autopack.enable(model):
            ours = cls.forward
            cls.forward = lambda self, *args, **kwargs: ours(self, *args, **kwargs)
            newcomer = cls.forward
            found = model(input_ids=IDS, position_ids=WHERE).logits
        assert cls.forward is newcomer
        assert torch.equal(model(input_ids=IDS).logits, stock(input_ids=IDS).logits)
    finally:
        cls.forward = before
    assert error(found, alone(stock, IDS, LENGTHS)) < FLOAT64


def test_without_the_site_it_raises(monkeypatch):
    model = llama()
    monkeypatch.setattr(hooks, "_is_past_entry", lambda *_: False)
    with autopack.enable(model), refused("past-the-entry"):
        model.model.forward(input_ids=IDS, position_ids=WHERE)

"""`model.forward(...)` of an enabled model is `model(...)`, at the model and at its backbone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial

import pytest

import autopack
from autopack.calls import hooks
from tests.conftest import FLOAT64, LENGTHS, alone, error, llama, positions, token_ids
from tests.engine import Call, must_be_exact
from tests.support.refusals import refused
from tests.support.trained import checkpointed

PACKED = {"input_ids": token_ids(), "position_ids": positions(LENGTHS)}
TYPES = ["llama", "gpt2", "mamba", "bloom", "qwen3_moe", "bert", "recurrent_gemma", "opt"]


@dataclass(frozen=True)
class Forwarded(Call):
    """`forward` is called, of the model or of a part of it."""

    part: str = ""

    def run(self, model, arguments):
        return model.get_submodule(self.part).forward(
            arguments.pop("input_ids"), **arguments, **self.given
        )


@pytest.mark.parametrize("model_type", TYPES)
def test_packed_rows_and_padded_batches(model_type):
    must_be_exact(model_type, Forwarded(given={"use_cache": False}).both)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_documents_of_the_backbone(implementation):
    must_be_exact(partial(llama, implementation), Forwarded(labels=None, part="model").row)


def test_checkpointing():
    must_be_exact("llama", Forwarded().row, checkpointed)


def test_the_signature_and_the_function_are_those_of_stock():
    model = llama()
    before, function = inspect.signature(model.forward), type(model).forward
    with autopack.enable(model):
        assert inspect.signature(model.forward) == before
        assert "forward" not in vars(model)
    assert type(model).forward is function


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
        assert error(model(**PACKED).logits, alone(stock, PACKED["input_ids"], LENGTHS)) < FLOAT64
        with refused("past-the-entry"):
            model.forward(**PACKED)


def test_without_the_site_it_raises(monkeypatch):
    model = llama()
    monkeypatch.setattr(hooks, "_is_past_entry", lambda *_: False)
    with autopack.enable(model), refused("past-the-entry"):
        model.model.forward(**PACKED)

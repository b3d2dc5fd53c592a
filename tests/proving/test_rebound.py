"""A forward around a model's own works on the twin: what it holds of the model is the twin's."""

import functools
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import AutoModel

import autopack
from autopack import tiny
from autopack.proving import twin
from autopack.proving.twin import NoTwin, rebound
from tests.engine import Call, check, leaks, must_be_exact
from tests.support.refusals import refused, refused_by_its_first_call

CALL = Call()


def around(model, change=lambda output: output, by="a method"):
    """As TRL's trainers put a fused head on a model: the new forward holds the old one, which is
    bound to the model."""
    old, text = model.forward, model.config.get_text_config()

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused=False, **kwargs):
        assert self.config.get_text_config() is text, "both are those of the same model"
        return change(old(*args, **kwargs))

    if by == "a method":
        model.forward = MethodType(forward, model)
    else:
        model.forward = functools.partial(forward, model)
    return model


def mixes(output):
    output.logits = output.logits + 0.3 * output.logits.cumsum(1)
    return output


@pytest.mark.parametrize("by", ["a method", "a partial"])
def test_the_twin_runs_and_not_the_model(by):
    # which can run nowhere
    with autopack.enable(around(tiny.build("llama").to("meta"), by=by)) as handle:
        assert handle.enabled.proof.source == "twin", handle.verified
    must_be_exact(lambda: around(tiny.build("llama"), by=by), CALL.row)


def test_what_mixes_tokens_there_is_refused():
    model = around(tiny.build("llama"), mixes)
    expected = CALL.alone(model)
    with refused("not-exact"):
        autopack.enable(model)
    with autopack.enable(model, verify=False):
        assert leaks(CALL.packed(model), expected), "the control"


def test_a_forward_that_holds_parts_of_the_model_has_no_twin():
    model = tiny.build("llama")
    head, old = model.lm_head, model.forward
    model.forward = MethodType(lambda self, *a, **k: (head, old(*a, **k))[1], model)
    with autopack.enable(model) as handle:
        assert "a Linear, which is a part of it" in handle.verified
        assert handle.enabled.proof.source == "checks"


class Module(nn.Module):
    """One that functions are put on."""


def test_less_usual_forms_in_which_functions_hold_a_module():
    """Closures of closures, functions that call themselves, cells that are not filled yet, and
    parameters."""
    one, other = Module(), Module()

    def inner(x):
        return one, x

    def outer(self, x):
        return inner(x)

    def itself(self, n):
        return one if n == 0 else itself(self, n - 1)

    assert rebound(MethodType(outer, one), one, other)(5) == (other, 5)
    assert outer(one, 5) == (one, 5), "the one on the model is as it was"
    assert rebound(itself, one, other)(other, 2) is other
    empty = [lambda: later]
    shared = rebound(empty[0], one, other)
    later = torch.zeros(1)
    assert shared() is later, "a cell that is filled later is the same for both"
    one.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    weight = one.weight
    with pytest.raises(NoTwin, match="a Parameter, which is a part of it"):
        rebound(lambda self: weight, one, other)
    with pytest.raises(NoTwin, match="has a part of it as a default"):
        rebound(lambda self, held=one: held, one, other)


NOTEBOOK = """
old = model.forward
def helper(*args, **kwargs):
    return old(*args, **kwargs)
def by_global(*args, **kwargs):
    return change(helper(*args, **kwargs))
def by_default(*args, old=old, **kwargs):
    return change(old(*args, **kwargs))
def by_model(*args, which=model, **kwargs):
    return change(type(which).forward(which, *args, **kwargs))
holder = [old]
def by_list(*args, **kwargs):
    return change(holder[0](*args, **kwargs))
class Holder:
    forward = staticmethod(old)
def by_class(*args, **kwargs):
    return change(Holder.forward(*args, **kwargs))
"""
"""Functions of a notebook, whose names are those of its module."""
IN_A_NOTEBOOK = ("by_global", "by_default", "by_model", "by_list", "by_class")


def of_a_notebook(name, change=lambda output: output):
    model = tiny.build("llama")
    names = {"model": model, "change": change}
    exec(NOTEBOOK, names)
    model.forward = names[name]
    return model


@pytest.mark.parametrize("name", IN_A_NOTEBOOK)
def test_a_forward_of_a_notebook_that_names_the_model(name):
    """The twin's calls the model, which must not be proven for that once more, by one more twin,
    and so on."""
    expected = CALL.alone(of_a_notebook(name))
    for model in (of_a_notebook(name), tiny.build("llama")):  # before and after it is enabled
        with autopack.enable(model):
            if "forward" not in vars(model):
                names = {"model": model, "change": lambda output: output}
                exec(NOTEBOOK, names)
                model.forward = names[name]
            check(CALL.packed(model), expected)


@pytest.mark.parametrize("name", IN_A_NOTEBOOK)
def test_what_mixes_tokens_in_a_notebook_is_refused(name):
    refused_by_its_first_call(of_a_notebook(name, mixes))


@pytest.mark.parametrize("tagged", [True, False])
def test_a_model_prepared_by_a_training_program_has_a_twin(tagged):
    """Tags for the model card, as TRL adds them, and a checkpoint function around transformers', as
    LLaMA-Factory's."""
    model = tiny.build("llama").train()
    if tagged:
        model.add_model_tags(["trl", "sft"])
    model.gradient_checkpointing_enable()

    def around(inner):
        def of_somebody(function, *args, **kwargs):
            return inner(function, *args, **kwargs)

        return of_somebody

    model.model._gradient_checkpointing_func = around(torch.utils.checkpoint.checkpoint)
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = around(layer._gradient_checkpointing_func)
    expected, padded = CALL.alone(model), CALL.padded(model)
    with autopack.enable(model) as handle:
        assert handle.enabled.proof.source == "twin", handle.verified
        check(CALL.packed(model), expected)
        check(CALL.padded(model), padded)
        assert handle.tally.batches == 1


@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_a_model_of_resized_embeddings_has_a_twin(model_type):
    """`resize_token_embeddings` writes the size on the model, on which not every class has it."""
    model = AutoModel.from_config(tiny.config(model_type))
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    assert model.vocab_size == model.config.vocab_size
    assert not twin.of(model).others

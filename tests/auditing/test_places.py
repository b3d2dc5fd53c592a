"""What mixes documents is named: by audits with its place in the source, by checks with that in the model."""

import inspect

import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaModel

import autopack
from autopack import tiny
from tests.support.refusals import refused_by_its_first_call


class Averaging(modeling_llama.LlamaMLP):
    def forward(self, states):
        return super().forward(states) + states.mean(dim=1, keepdim=True)


class Around(nn.Module):
    """Something of the user's with a layer of torch in it, which is not to blame for what it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(64, 64)

    def forward(self, states):
        return self.last(self.inner(states) + states.cumsum(dim=1))


class Raising(modeling_llama.LlamaMLP):
    def forward(self, states):
        if states.shape[1] > 20:
            raise IndexError("not so many")
        return super().forward(states)


def line_of(cls):
    return inspect.unwrap(cls.forward).__code__.co_firstlineno


def with_layer(make, number=1):
    model = tiny.build("llama", attn_implementation="sdpa")
    layer = model.model.layers[number]
    layer.mlp = make(model, layer)
    return model


def audited(model):
    with autopack.enable(model, verify=False):
        return autopack.audit(model).packed


def test_the_module_that_mixes_is_named():
    model = with_layer(lambda model, layer: Averaging(model.config))
    assert f"it begins in Averaging, {__name__}, line {line_of(Averaging)}" in audited(model)
    assert "It begins in model.layers.1.mlp, of the class Averaging." in refused_by_its_first_call(model)


def test_a_layer_of_torch_is_not_named_for_what_it_is_given():
    model = with_layer(lambda model, layer: Around(layer.mlp))
    assert f"it begins in Around, {__name__}, line {line_of(Around)}" in audited(model)
    assert "It begins in model.layers.1.mlp, of the class Around." in refused_by_its_first_call(model)


def test_a_hook_is_found_in_the_module_around_what_it_is_on():
    model = tiny.build("llama", attn_implementation="sdpa")
    model.model.layers[-1].register_forward_hook(lambda module, given, output: output + output.mean(1, keepdim=True))
    place = f"it begins in LlamaModel, transformers.models.llama.modeling_llama, line {line_of(LlamaModel)}"
    assert place in audited(model)
    assert "It begins in model, of the class LlamaModel." in refused_by_its_first_call(model)


def test_what_is_exact_is_not_searched():
    model = tiny.build("llama")
    autopack.enable(model, verify=False)
    report = autopack.audit(model)
    assert report.exact
    assert "place" not in report.notes


def test_code_of_transformers_is_named_by_its_own_module(monkeypatch):
    forward = modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: forward(self, x - x.mean(1, True)))
    model = tiny.build("llama")
    autopack.enable(model, verify=False)
    report = autopack.audit(model)
    assert "it begins in LlamaRMSNorm" in report.packed
    assert torch.nn.modules.module._global_forward_hooks == {}


def test_the_line_of_transformers_that_an_error_came_by_is_named():
    model = with_layer(lambda model, layer: Raising(model.config))
    autopack.enable(model, verify=False)
    report = autopack.audit(model, modes=("default",))
    source, first = inspect.getsourcelines(modeling_llama.LlamaDecoderLayer.forward)
    line = first + next(n for n, text in enumerate(source) if "self.mlp(" in text)
    assert f"(transformers.models.llama.modeling_llama, line {line})" in report.packed

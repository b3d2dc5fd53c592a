"""What mixes documents is named, by audits and by checks."""

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import autopack
from autopack import tiny
from tests.support.refusals import refused_by_its_first_call


class Averaging(modeling_llama.LlamaMLP):
    def forward(self, states):
        return super().forward(states) + states.mean(dim=1, keepdim=True)


class Around(nn.Module):
    """Something of the user's with a layer of torch in it, which is not to blame for what it is
    given."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(64, 64)

    def forward(self, states):
        return self.last(self.inner(states) + states.cumsum(dim=1))


def with_layer(make, number=1):
    model = tiny.build("llama", attn_implementation="sdpa")
    layer = model.model.layers[number]
    layer.mlp = make(model, layer)
    return model


def audited(model):
    with autopack.enable(model, verify=False):
        return autopack.audit(model).packed


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda model, layer: Averaging(model.config), Averaging),
        # A layer of torch is not named for what it is given.
        (lambda model, layer: Around(layer.mlp), Around),
    ],
)
def test_the_module_that_mixes_is_named(make, kind):
    model, name = with_layer(make), kind.__name__
    assert f"it begins in model.layers.1.mlp, of the class {name})" in audited(model)
    assert f"It begins in model.layers.1.mlp, of the class {name}." in refused_by_its_first_call(
        model
    )


def test_a_hook_is_found_in_the_module_around_what_it_is_on():
    model = tiny.build("llama")
    model.model.layers[-1].register_forward_hook(
        lambda module, given, output: output + output.mean(1, keepdim=True)
    )
    assert "it begins in model, of the class LlamaModel)" in audited(model)
    assert "It begins in model, of the class LlamaModel." in refused_by_its_first_call(model)


def test_code_of_transformers_is_named_by_its_own_module(monkeypatch):
    forward = modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, x: forward(self, x - x.mean(1, True))
    )
    assert "of the class LlamaRMSNorm)" in audited(tiny.build("llama"))
    assert torch.nn.modules.module._global_forward_hooks == {}

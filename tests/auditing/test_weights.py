"""Weights that a forward itself writes to are, after an audit, what they were before it."""

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from tests.conftest import token_ids


class Bounded(nn.Linear):
    """Its forward bounds its weights."""

    def forward(self, hidden):
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(hidden)


def altup(**options):
    """Gemma 3n, whose forward in training bounds weights of a part's part, as a class that no run
    has measured."""
    model = tiny.build("gemma3n_text", altup_coef_clip=0.01, **options)
    return type("Mine", (type(model),), {})(model.config)


def bounded():
    model = tiny.build("llama")
    model.lm_head = Bounded(64, model.config.vocab_size, bias=False)
    return model


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("build", [altup, bounded])
@pytest.mark.parametrize("training", [False, True])
def test_an_audit_leaves_them_as_they_were(build, training):
    model = build().train(training)
    before = copies(model)
    handle = autopack.enable(model, verify=False)
    autopack.audit(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    handle.remove()
    model.train()(input_ids=token_ids(1, 5))
    assert any(
        not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()
    )

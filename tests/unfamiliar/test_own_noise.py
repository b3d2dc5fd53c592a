"""Layers of the user's own that draw for each token: exact in law, so they are served; where they
mix, they are not."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack import tiny
from tests.engine import Call, check
from tests.subjects import Mixes
from tests.support.refusals import refused_by_its_first_call


class Own(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.p, self.config = 0.3, config
        self.around = nn.Identity()

    def forward(self, x):
        return super().forward(self.around(self.noisy(x)))

    def noisy(self, x):
        return F.dropout(x, self.p, self.training)


class OfConfiguration(Own):
    def noisy(self, x):
        return F.dropout(x, p=self.config.my_rate, training=self.training)


def noise(x):
    return x + 0.1 * torch.randn(x.shape)


def coin(x, share=0.8):
    return x * torch.bernoulli(torch.full_like(x, share)) / share


def coin_in_place(x):
    return x * torch.empty(x.shape[:2]).bernoulli_(0.9)[..., None]


def gumbel(x):
    return x * F.gumbel_softmax(x, hard=True)


dropping = functools.partial(F.dropout, p=0.2)


def swaps(x):
    return torch.where(torch.rand(*x.shape[:2], 1) < 0.1, x.roll(1, 1), x)


def shuffles(x):
    return x + x[:, torch.rand(x.shape[1]).argsort()]


def scaled(x):
    return x + torch.randn_like(x) * x.std()


HELPERS = [noise, coin, coin_in_place, gumbel, dropping]
MIXING = [swaps, shuffles, scaled]


class ByHelper(Own):
    helper = staticmethod(noise)

    def noisy(self, x):
        return type(self).helper(x) if self.training else x


def calling(helper):
    return type("Calling", (ByHelper,), {"helper": staticmethod(helper), "__module__": __name__})


OF_HELPERS = [calling(helper) for helper in HELPERS]
LAYERS = [Own, OfConfiguration, *OF_HELPERS]


def built(layer, mixes):
    torch.manual_seed(0)
    model = tiny.build("llama")
    model.config.my_rate = 0.2
    for each in model.model.layers:
        mlp = layer(model.config)
        mlp.load_state_dict(each.mlp.state_dict())
        each.mlp = mlp
        if mixes:
            mlp.around = nn.Sequential(mlp.around, Mixes())
    return model


@pytest.mark.parametrize("layer", LAYERS)
def test_noise_of_each_token_is_served(layer):
    model = built(layer, mixes=False)
    call, training = Call(labels=None, lengths=(6, 5)), Call(lengths=(6, 5))
    with torch.no_grad():
        expected = call.alone(model.eval())
    with autopack.enable(model) as handle:
        training.packed(model.train())
        assert handle.checked.checks
        with torch.no_grad():
            check(call.packed(model.eval()), expected)


@pytest.mark.parametrize("layer", [Own, OF_HELPERS[0]])
def test_noise_beside_what_mixes_is_refused(layer):
    refused_by_its_first_call(built(layer, mixes=True), trains=True)


@pytest.mark.parametrize("helper", MIXING)
def test_noise_that_mixes_is_refused(helper):
    """What is drawn decides whether tokens mix, in which order, or how much another document
    adds."""
    refused_by_its_first_call(built(calling(helper), mixes=False), trains=True)

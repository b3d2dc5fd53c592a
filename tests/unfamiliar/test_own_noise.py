"""Layers of the user's own that draw for each token: exact in law, so they are served; where they mix, they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack import tiny

EXACT = 2e-5
"""Of logits of a tiny model in float32: other rows, other order of sums."""


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.cumsum(1)


class Own(LlamaMLP):
    def __init__(self, config: Any):
        super().__init__(config)
        self.p, self.config = 0.3, config
        self.around: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.around(self.noisy(x)))

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.p, self.training)


class OfConfiguration(Own):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=self.config.my_rate, training=self.training)


class Gaussian(Own):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) * self.p if self.training else x


class Uniform(Own):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty_like(x).uniform_(0.9, 1.1) if self.training else x


class Leaky(Own):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(x, training=self.training)


class ByModule(Own):
    def __init__(self, config: Any):
        super().__init__(config)
        self.around = nn.RReLU()


LAYERS = [Own, OfConfiguration, Gaussian, Uniform, Leaky, ByModule]


def built(layer: type[Own], mixes: bool) -> Any:
    torch.manual_seed(0)
    model = tiny.build("llama")
    model.config.my_rate = 0.2
    for each in model.model.layers:
        mlp = layer(model.config)
        mlp.load_state_dict(each.mlp.state_dict())
        each.mlp = mlp
        if mixes:
            mlp.around = nn.Sequential(mlp.around, Mixing())
    return model


@pytest.mark.parametrize("layer", LAYERS)
def test_noise_of_each_token_is_served(layer):
    model = built(layer, mixes=False)
    ids = torch.randint(5, 90, (1, 11), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(6), torch.arange(5)])[None]
    with torch.no_grad():
        expected = torch.cat([model.eval()(part).logits for part in (ids[:, :6], ids[:, 6:])], 1)
    with autopack.enable(model) as handle:
        model.train()
        model(ids, position_ids=positions, labels=ids).loss.backward()
        assert handle.envelope.checks
        model.eval()
        with torch.no_grad():
            found = model(ids, position_ids=positions, use_cache=False).logits
    assert float((found - expected).abs().max() / expected.std()) < EXACT


@pytest.mark.parametrize("layer", LAYERS)
def test_noise_that_mixes_is_refused(layer):
    with pytest.raises(autopack.UnsupportedModel):
        autopack.enable(built(layer, mixes=True))

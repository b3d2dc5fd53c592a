"""Modules that keep state of a batch get it as it came: over padding, as in stock."""

import copy

import pytest
import torch

import autopack
from tests.support.padded import build, packs_at_once
from tests.support.prefixes import group, padded


class Around(torch.nn.Module):
    """Runs a feed-forward layer, and keeps something of what it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(inner.gate_proj.in_features))
        self.count, self.calls = 0, 0

    def forward(self, states):
        self.calls += 1
        if self.training:
            self.keep(states.detach())
        return self.inner(states)

    def keep(self, states):
        raise NotImplementedError


class InBuffer(Around):
    def keep(self, states):
        self.mean.mul_(0.9).add_(0.1 * states.flatten(0, -2).mean(0))


class NewBuffer(Around):
    def keep(self, states):
        self.mean = 0.9 * self.mean + 0.1 * states.flatten(0, -2).mean(0)


class InNumber(Around):
    def keep(self, states):
        self.count += states.flatten(0, -2).shape[0]


class Nothing(Around):
    def keep(self, states):
        return


def state(model):
    mlp = model.model.layers[0].mlp
    return torch.cat([mlp.mean, torch.tensor([mlp.count, mlp.calls])])


def train(model, labels, calls=3):
    for seed in range(calls):
        batch = padded(group(4, seed=seed), labels=labels)
        output = model(**batch, use_cache=False)
        loss = (
            output.loss if labels else output.logits[batch["attention_mask"].bool()].square().mean()
        )
        loss.backward()


def twins(kind):
    stock = build("llama").train()
    stock.model.layers[0].mlp = kind(stock.model.layers[0].mlp)
    return stock, copy.deepcopy(stock)


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "a loss of one's own"])
@pytest.mark.parametrize("kind", [InBuffer, NewBuffer, InNumber])
def test_state_is_that_of_the_batch_as_it_came(kind, labels):
    stock, model = twins(kind)
    with autopack.enable(model) as handle:
        train(model, labels)
        assert handle.tally.batches == 0
        assert any("keeps state of all columns" in reason for reason in handle.tally.left)
    train(stock, labels)
    assert torch.allclose(state(model), state(stock), atol=1e-5)


def test_a_module_that_keeps_nothing_costs_a_look():
    _, model = twins(Nothing)
    with autopack.enable(model) as handle:
        train(model, labels=True, calls=5)
        assert handle.tally.batches == 2  # calls 1, 2 and 4 are looked at


def test_without_a_look_state_is_another_one():
    """The control."""
    stock, model = twins(InBuffer)
    with packs_at_once(model) as handle:
        train(model, labels=True)
        assert handle.tally.batches == 3
    train(stock, labels=True)
    assert not torch.allclose(state(model), state(stock), atol=1e-5)

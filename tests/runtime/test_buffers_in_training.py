"""Buffers that a forward in training writes to: every document begins with what the call began
with.

A spectral norm takes a step of its power iteration in each training forward. Where autopack runs a
module several times in one packed call, or once more to check it, documents alone would not see
those steps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as hooked_spectral_norm

import autopack
from autopack import tiny
from autopack.runtime.runs import Buffers
from autopack.watching.schedule import Runs
from tests.conftest import positions
from tests.support.refusals import refused

LENGTHS = (9, 1, 20)
EXACT = 1e-5
"""Relative, of logits in float32: another order of sums."""
NORMS = {"by a hook": hooked_spectral_norm, "parametrized": parametrizations.spectral_norm}
# Its parts that mix tokens run document by document; so does the whole model; documents as rows;
# nothing runs twice.
PARTS = {"bloom": "dense", "cpmant": "attention_out", "mamba": "out_proj", "llama": "o_proj"}


def _model(name, norm):
    torch.manual_seed(0)
    model = tiny.build(name).train()
    for module in [
        m
        for name, m in model.named_modules()
        if name.endswith(f".{PARTS[model.config.model_type]}")
    ]:
        norm(module)
    return model


def _row(model):
    return {
        "input_ids": tiny.tokens(model.config, 1, sum(LENGTHS)),
        "position_ids": positions(LENGTHS),
    }


def _alone(stock, row):
    parts = row["input_ids"].split(LENGTHS, dim=1)
    return [copy.deepcopy(stock)(input_ids=part).logits for part in parts]


def _error(model, **options):
    stock, row = copy.deepcopy(model), _row(model)
    with autopack.enable(model, **options):
        found = model(**row).logits
    return max(
        float(((f - a).norm() / a.norm()).detach())
        for f, a in zip(found.split(LENGTHS, dim=1), _alone(stock, row), strict=True)
    )


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("name", PARTS)
def test_documents_begin_with_the_buffers_of_the_call(name, norm):
    assert _error(_model(name, norm)) < EXACT


@pytest.mark.parametrize("name", ["bloom", "cpmant"])
def test_without_that_later_documents_see_the_steps_of_earlier_ones(monkeypatch, name):
    monkeypatch.setattr(Buffers, "put_back", lambda self: False)
    assert _error(_model(name, hooked_spectral_norm), verify=False) > 100 * EXACT


@pytest.mark.parametrize(
    ("name", "norm"), [("bloom", hooked_spectral_norm), ("llama", parametrizations.spectral_norm)]
)
def test_a_call_takes_one_step_as_a_forward_does(name, norm):
    """A check puts back what it finds, which is what the call has left behind."""
    model = _model(name, norm)
    stock, row = copy.deepcopy(model), _row(model)
    handle = autopack.enable(model)
    for _ in range(2):
        model(**row).logits.sum().backward()
        stock(input_ids=row["input_ids"])
    assert handle.checked.checks or name == "bloom"
    for (name, found), wanted in zip(model.named_buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, msg=name)


def test_gradients_are_those_of_documents_alone():
    model = _model("bloom", hooked_spectral_norm)
    stock, row = copy.deepcopy(model), _row(model)
    autopack.enable(model)
    model(**row).logits.square().sum().backward()
    buffers = [buffer.clone() for buffer in stock.buffers()]
    for part in row["input_ids"].split(LENGTHS, dim=1):
        for buffer, before in zip(stock.buffers(), buffers, strict=True):
            buffer.data.copy_(before)
        stock(input_ids=part).logits.square().sum().backward()
    for (name, found), wanted in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, wanted.grad, rtol=1e-4, atol=1e-4 * float(wanted.grad.abs().max()), msg=name
        )


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_checks_take_no_step_of_a_norm_for_a_leak(norm):
    """`check_every` looks at models of the libraries' own code, too, and not at what they began
    with."""
    model = _model("llama", norm)
    handle = autopack.enable(model, check_every=1)
    torch.manual_seed(1)
    for module in model.modules():
        # of weights that have just been loaded
        if isinstance(module, parametrizations._SpectralNorm):
            module._u.normal_()
            module._v.normal_()
    for _ in range(4):
        model(**_row(model))
    assert handle.checked.checks >= 3


class _Remembers(nn.Module):
    """Hands on the mean of a long row, by a buffer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, states):
        if states.shape[1] >= 700:
            self.seen.copy_(states.detach().mean())
        return self.inner(states) + self.seen


def test_a_leak_by_a_buffer_is_found_in_the_call_that_shows_it():
    model = tiny.build("llama", max_position_embeddings=2048).train()
    layer = model.model.layers[0]
    layer.mlp = _Remembers(layer.mlp)
    handle = autopack.enable(model)
    lengths = (400, 300)
    with refused("leak-detected"):
        model(input_ids=tiny.tokens(model.config, 1, sum(lengths)), position_ids=positions(lengths))
    assert handle.checked.leaks == 1


def test_without_what_the_call_began_with_it_is_not(monkeypatch):
    made = Runs.__init__
    monkeypatch.setattr(Runs, "__init__", lambda self, call, begin: made(self, call, lambda: None))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_leak_by_a_buffer_is_found_in_the_call_that_shows_it()


def test_heads_that_run_documents_alone():
    torch.manual_seed(0)
    model = tiny.build("bert", task="sequence-classification").train()
    for module in [m for name, m in model.named_modules() if name.endswith("output.dense")]:
        hooked_spectral_norm(module)
    stock, row = copy.deepcopy(model), _row(model)
    autopack.enable(model, verify=False)
    found = model(**row, output_attentions=True).logits  # for which its documents run alone
    torch.testing.assert_close(found, torch.cat(_alone(stock, row)), atol=1e-5, rtol=1e-4)

"""Checks of live calls: planted leaks are found and named, and nothing of training changes by a
check."""

import pickle
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch._dynamo.testing

import autopack
from autopack.attention import choose
from autopack.calls import rows as packed
from autopack.errors import Leak
from autopack.inspection.randomness import state_of
from autopack.layout.packed import PackedLayout
from tests.conftest import positions, token_ids
from tests.support.mixing import shift_boundaries
from tests.support.padded import build
from tests.support.refusals import refused
from tests.support.training_calls import (
    FLOAT32,
    lengths_of,
    noisy,
    padded,
    row,
    segments,
    trained,
    with_and_without_noise,
)


def forget_boundaries(monkeypatch):
    """Plant a leak: attention takes every row for one document."""

    def attend(call):
        rows = PackedLayout.from_lengths([[call.layout.columns]] * call.layout.rows)
        return own.attend(replace(call, layout=rows, mask=None))

    own = choose.BACKENDS["sdpa"]
    monkeypatch.setitem(choose.BACKENDS, "sdpa", replace(own, attend=attend))


@with_and_without_noise
@pytest.mark.parametrize("form", [row, padded])
@pytest.mark.parametrize(("every", "plant"), [(4, shift_boundaries), (2, forget_boundaries)])
def test_a_planted_leak_is_found_and_its_document_named(monkeypatch, form, noise, every, plant):
    model = build("llama")
    noise(model)
    with autopack.enable(model, check_every=every) as handle:
        trained(model, *(form(step) for step in range(every)))
        assert 1 <= handle.checked.checks <= every
        assert handle.checked.worst < FLOAT32
        plant(monkeypatch)
        with refused("leak-detected", match=r"document \d \(row \d, columns") as raised:
            trained(model, *(form(5 + step) for step in range(3 * every)))  # call every + 1 + step
        report = raised.value.report
        assert isinstance(report, Leak)
        assert report.document in ((0, 1) if plant is shift_boundaries else (1, 2, 3))
        assert report.error > 1e-2 > FLOAT32 > report.tolerance
        starts = (
            sum(lengths_of(5 + report.step - every - 1)[: report.document]) if form is row else 0
        )
        assert (report.row, report.columns[0]) == (
            (0, starts) if form is row else (report.document, 0)
        )
        assert handle.checked.leaks == 1
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


class Touching(torch.nn.Module):
    """Hands one token in the middle of a long row a little of the first."""

    def forward(self, states):
        if states.shape[1] <= 40:
            return states
        column = torch.arange(states.shape[1])[:, None]
        return torch.where(column == 40, states + 3e-3 * states[:, :1], states)


def test_a_small_leak_at_one_token_of_many_is_found():
    model, lengths = build("llama"), (3, 39, 5)
    model.model.norm = torch.nn.Sequential(model.model.norm, Touching())
    ids = token_ids(columns=sum(lengths))
    given = {"input_ids": ids, "position_ids": positions(lengths), "labels": ids}
    with autopack.enable(model, check_every=1, verify=False):
        with refused("leak-detected") as raised:
            trained(model, given)
        assert raised.value.report.columns == (3, 42)


def test_labels_at_boundaries_are_part_of_it(monkeypatch):
    """The call is run once more with the labels of one document, and its loss is compared too."""
    model = noisy(build("llama"))
    with autopack.enable(model, check_every=1) as handle:
        monkeypatch.setattr(packed, "without_boundaries", lambda labels, *_: labels)
        with refused("leak-detected") as raised:
            trained(model, *(row(step) for step in range(1, 5)))
        assert raised.value.report.field == "loss"
        assert handle.checked.leaks == 1
        assert "leaking" in repr(handle)


def test_positions_that_run_on_are_found_by_a_document_alone(monkeypatch):
    """Nobody's tokens have a part in them, so that replacing documents shows nothing."""

    def running_on(call, arguments, layout):
        arguments["position_ids"] = torch.arange(layout.columns).expand(layout.rows, -1)

    model = build("gpt2").eval()
    with autopack.enable(model):
        monkeypatch.setattr(packed, "_add_positions", running_on)
        with refused("leak-detected", match="got other logits than it gets alone"):
            model(**{name: value for name, value in row(0).items() if name != "labels"})


class Drawing(torch.nn.Module):
    """A layer that draws from every generator to no effect, counts its calls, and writes to what
    its graph holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("one", torch.ones(()))
        self.calls = 0

    def forward(self, states):
        self.count += 1
        self.calls += 1
        drawn = torch.rand(()) + random.random() + float(np.random.random())
        return states * self.one.mul_(1.0) + 0.0 * drawn


def with_drawing_layer():
    model = noisy(build("llama"))
    model.model.norm = torch.nn.Sequential(model.model.norm, Drawing())
    return model


def checkpointed(model_type, reentrant):
    model = noisy(build(model_type, attn_implementation="eager"))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


def picture(model):
    """All state of a model and of the generators, as what can be compared."""
    tensors = {
        name: value.tolist() for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    numbers = {
        f"{name}.{key}": v for name, m in model.named_modules() for key, v in vars(m).items()
    }
    plain = {key: value for key, value in numbers.items() if isinstance(value, int | float | str)}
    return [tensors, plain, *state_of(model)]


TRAINED = [
    (partial(checkpointed, model_type, reentrant), segments)
    for reentrant in (None, True, False)
    for model_type in ("gpt2", "llama", "mamba", "qwen2_moe")
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("make", "form"), [(with_drawing_layer, row), *TRAINED])
def test_training_is_bit_for_bit_what_it_is_without(make, form):
    found = []
    for watch in (0, 1):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = make()
        with autopack.enable(model, check_every=watch, verify=form is segments) as handle:
            outputs = trained(model, *((form, padded)[step % 2](step) for step in range(6)))
            # Padded batches of a layer that counts keep their padding, for they are a state of it.
            assert handle.tally.batches == 3 * (form is segments)
            assert (
                handle.checked is None
                if watch == 0
                else handle.checked.checks == 3 + handle.tally.batches
            )
        found.append([[output.loss.item() for output in outputs], picture(model)])
    assert found[0] == found[1]
    assert form is segments or model.model.norm[1].calls == model.model.norm[1].count == 6


class MixingDropout(torch.nn.Dropout):
    """A dropout of the user's that hands tokens something of the one before, where it drops any."""

    def forward(self, states):
        return states + 0.1 * states.roll(1, 1) if self.training and self.p else states


def test_dropout_that_mixes_is_found():
    """It is off in every twin and every document alone."""
    model = build("llama").train()
    layer = model.model.layers[0]
    layer.mlp = torch.nn.Sequential(layer.mlp, MixingDropout(0.1))
    with (
        autopack.enable(model),
        refused("leak-detected", match="when other documents were replaced"),
    ):
        model(**row(0))


class Forgetful(torch.nn.Module):
    """A layer that gives something else each time, by what it counts."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def forward(self, states):
        self.times += 1
        return states * (1 + self.times % 7)


def test_what_is_another_one_in_each_run_is_no_leak():
    model = build("llama").eval()
    model.model.norm = torch.nn.Sequential(model.model.norm, Forgetful())
    with autopack.enable(model) as handle, torch.no_grad():
        model(**{name: value for name, value in row(0).items() if name != "labels"})
        assert handle.checked.leaks == 0

"""The toys of foreign_parts.py do what they say: replacing one token moves others in those that mix alone."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from tests.proving.foreign_parts import MIXING, TOKEN_WISE, Form, FusedNorm, Part
from tests.support.refusals import refused

WIDTH_IN, WIDTH_OUT = 8, 12
FORMS = [
    Form(rows, tokens, dtype, train)
    for rows, tokens in ((1, 24), (2, 32), (4, 65), (3, 130))
    for dtype in (torch.float64, torch.float32)
    for train in (True, False)
]


def results(part: Part, states: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens get, and their gradients of a weighted sum of it; dropout draws the same every time."""
    states = states.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = part(states)
    (gradient,) = torch.autograd.grad((output * weights).sum(), states)
    return output.detach(), gradient


def drawn(part: Part, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    part.to(form.dtype).train(form.train)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(form.rows, form.tokens, WIDTH_IN, generator=generator).to(form.dtype)
    return states, torch.randn(form.rows, form.tokens, WIDTH_OUT, generator=generator).to(form.dtype)


def moved(part: Part, form: Form) -> tuple[float, float]:
    """How far others move, in results and in gradients, where the first token of each row is replaced in turn."""
    states, weights = drawn(part, form)
    before = results(part, states, weights)
    worst = [0.0, 0.0]
    for row in range(form.rows):
        changed, turned = states.clone(), weights.clone()
        changed[row, 0] *= -20
        turned[row, 0] *= -3
        for number, (a, b) in enumerate(zip(before, results(part, changed, turned), strict=True)):
            others = (a - b).abs()
            others[row, 0] = 0
            worst[number] = max(worst[number], float(others.max() / a.std()))
    return worst[0], worst[1]


def weight_error(part: Part, form: Form) -> float:
    """How far the gradients of parameters are from the sum of what tokens make one by one."""
    states, weights = drawn(part, form)
    parameters = [p for p in part.parameters() if p.requires_grad]

    def gradients(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        found = torch.autograd.grad((part(a) * b).sum(), parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    whole = gradients(states, weights)
    ones = [
        (states[r : r + 1, t : t + 1], weights[r : r + 1, t : t + 1])
        for r in range(form.rows)
        for t in range(form.tokens)
    ]
    apart = [sum(each) for each in zip(*(gradients(a, b) for a, b in ones), strict=True)]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in zip(whole, apart, strict=True))


@pytest.mark.parametrize("kind", TOKEN_WISE, ids=lambda kind: kind.__name__)
def test_parts_that_treat_every_token_by_itself(kind):
    assert not kind.mixes
    part = kind.make(WIDTH_IN, WIDTH_OUT)
    for form in FORMS:
        bound = 1e-5 if form.dtype == torch.float32 else 1e-12
        assert max(moved(part, form)) < bound, form
    still = dataclasses.replace(FORMS[0], train=False)  # without dropout
    assert weight_error(part, still) < 1e-10


@pytest.mark.parametrize("kind", MIXING, ids=lambda kind: kind.__name__)
def test_parts_that_mix(kind):
    assert kind.mixes
    part = kind.make(WIDTH_IN, WIDTH_OUT)
    outputs, gradients = moved(part, kind.shows)
    if kind.shows.backward:
        assert outputs < 1e-12
        assert max(gradients, weight_error(part, kind.shows)) > 1e-3
    else:
        assert outputs > 1e-3
    if kind.hides is not None:
        assert max(moved(kind.make(WIDTH_IN, WIDTH_OUT), kind.hides)) < 1e-5


def test_a_norm_that_adds_the_residual_gives_both():
    part = FusedNorm.make(WIDTH_IN, WIDTH_OUT)
    states, residual = torch.randn(2, 3, 5, WIDTH_IN).unbind(0)
    normed, summed = part(states, residual)
    torch.testing.assert_close(summed, states + residual)
    torch.testing.assert_close(normed, part(summed))


def test_parts_are_the_same_for_a_seed_and_leave_the_random_state():
    before = torch.get_rng_state()
    one, other = Part.make(4, 4), Part.make(4, 4)
    assert torch.equal(one.weight, other.weight)
    assert not torch.equal(one.weight, Part.make(4, 4, seed=1).weight)
    assert torch.equal(before, torch.get_rng_state())


def model_with(part: Part, form: Form) -> Any:
    """A Llama whose first layer has a part in the place of its gate, in the dtype and mode in which the part shows."""
    model = tiny.build("llama", max_position_embeddings=512, use_cache=False)
    width = model.config.hidden_size
    model.model.layers[0].post_attention_layernorm.weight.data *= 3  # some states are outliers
    model.model.layers[0].mlp.gate_proj = type(part).make(width, model.config.intermediate_size)
    return model.to(form.dtype).train(form.train)


@pytest.mark.parametrize("kind", [*TOKEN_WISE, *MIXING], ids=lambda kind: kind.__name__)
def test_what_checks_say_of_a_model_with_a_part(kind):
    """The first call of the form in which a part shows it is refused, and no call of any other."""
    form = kind.shows
    model = model_with(kind.make(8, 8), form)
    half = form.tokens // 2
    ids = tiny.tokens(model.config, form.rows, form.tokens)
    where = torch.cat([torch.arange(half), torch.arange(form.tokens - half)]).expand(form.rows, -1)
    with autopack.enable(model) as handle:
        with refused("leak-detected") if kind.mixes else nullcontext():
            output = model(input_ids=ids, position_ids=where, labels=ids)
            if form.train:
                output.loss.backward()
        assert (handle.checked.checks, handle.checked.leaks) == (1, int(kind.mixes))
        assert not handle.checked.skipped

"""Encoder-decoders whose forward only passes on: thin subclasses with any signature, and classes that were wrapped."""

from __future__ import annotations

import pytest

import autopack
from tests.encoder_decoder.pairs import Pairs, alone, build, covered, forms_of, hold, leaks

pytestmark = [covered, pytest.mark.usefixtures("nothing_left_behind")]
TYPES = [
    "bart", "blenderbot", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus", "plbart", "switch_transformers", "t5",
    "umt5",
]  # fmt: skip


def passing_all_on(base):
    class PassingAllOn(base):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    return PassingAllOn


def naming_some(base):
    class NamingSome(base):
        def forward(self, labels=None, temperature=1.0, **kwargs):
            return super().forward(labels=labels, **kwargs)

    return NamingSome


def calling_its_base(base):
    class CallingItsBase(base):
        def forward(self, *args, **kwargs):
            return base.forward(self, *args, **kwargs)

    return CallingItsBase


def wrapped(base):
    class Wrapped(base):
        pass

    inner = base.forward

    def forward(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    Wrapped.forward = forward
    return Wrapped


FORMS = [passing_all_on, naming_some, calling_its_base, wrapped]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", TYPES)
def test_thin_subclasses_are_exact(model_type, form):
    pairs, model = Pairs.draw(), build(model_type)
    model.__class__ = form(type(model))
    expected = alone(model, pairs)
    assert leaks(model, pairs, expected, pairs.undeclared()), "control"
    with autopack.enable(model):
        hold(model, pairs, expected, *forms_of(model_type))

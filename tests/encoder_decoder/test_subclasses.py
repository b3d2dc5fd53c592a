"""Encoder-decoders whose forward only passes on: thin subclasses with any signature, and classes that were wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import autopack
from autopack.inspection.source import parameters_of
from tests.encoder_decoder.pairs import Pairs, alone, build, covered, forms_of, hold, leaks

pytestmark = [covered, pytest.mark.usefixtures("nothing_left_behind")]
TYPES = [
    "bart", "blenderbot", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus", "plbart", "switch_transformers", "t5",
    "umt5",
]  # fmt: skip


def passing_all_on(base: Any) -> Any:
    class PassingAllOn(base):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    return PassingAllOn


def naming_some(base: Any) -> Any:
    class NamingSome(base):
        def forward(self, labels=None, temperature=1.0, **kwargs):
            return super().forward(labels=labels, **kwargs)

    return NamingSome


def calling_its_base(base: Any) -> Any:
    class CallingItsBase(base):
        def forward(self, *args, **kwargs):
            return base.forward(self, *args, **kwargs)

    return CallingItsBase


def wrapped(base: Any) -> Any:
    class Wrapped(base):
        pass

    inner = base.forward

    def forward(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    Wrapped.forward = forward
    return Wrapped


FORMS = [passing_all_on, naming_some, calling_its_base, wrapped]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_forward_that_passes_on_takes_what_the_class_below_takes(model_type, form):
    base = type(build(model_type))
    names, wanted = parameters_of(form(base)).names, parameters_of(base).names
    assert set(wanted) <= set(names)
    if form is not naming_some:
        assert names == wanted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", ["t5", "bart", "pegasus"])
def test_thin_subclasses_are_exact(model_type, form):
    pairs, model = Pairs.draw(), build(model_type)
    model.__class__ = form(type(model))
    expected = alone(model, pairs)
    assert leaks(model, pairs, expected, pairs.undeclared()), "control"
    with autopack.enable(model):
        hold(model, pairs, expected, *forms_of(model_type))


def test_a_forward_patched_at_the_class_is_read_anew(monkeypatch):
    base = transformers.T5ForConditionalGeneration
    before = parameters_of(base)

    def forward(self, input_ids=None, style=None):
        raise NotImplementedError

    monkeypatch.setattr(base, "forward", forward)
    assert parameters_of(base).names == ("input_ids", "style")
    monkeypatch.undo()
    assert parameters_of(base) == before


def test_a_forward_that_does_not_pass_on_has_its_own_parameters():
    class Own(transformers.T5ForConditionalGeneration):
        def forward(self, input_ids=None, **kwargs):
            return self.encoder(input_ids, **kwargs)

    found = parameters_of(Own)
    assert found.names == ("input_ids",)
    assert found.takes_others

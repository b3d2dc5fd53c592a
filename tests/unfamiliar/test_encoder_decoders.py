"""Unfamiliar encoder-decoders: subclasses, replaced parts, halves that are enabled on their own."""

import pytest

from tests.encoder_decoder.pairs import Pairs, alone, result
from tests.engine import WHEN, Call, verdict
from tests.subjects import alternating, build, crossed, layers_of, subclass
from tests.unfamiliar import parts
from tests.unfamiliar.properties import Property, table
from tests.unfamiliar.test_subclasses import passes_all_on

TYPES = ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "plbart", "mvp",
         "switch_transformers")  # fmt: skip
PAIRS = Pairs.draw((5, 7, 4), (3, 6, 4))


def called(form):
    return lambda model: result(model, PAIRS, form, model(**getattr(PAIRS, form)()))


CALLS = (
    (called("one_row"), lambda model: alone(model, PAIRS), called("undeclared")),
    (called("padded"),) * 2,
)


def make(model_type, *_):
    return build(model_type, "seq2seq")


def in_half(model, place, kind):
    """Put a part of one half inside a module of the user's."""
    decodes, where = place
    half = model.get_decoder() if decodes else model.get_encoder()
    stack = layers_of(half)
    if where == "layer":
        stack[0] = kind(stack[0])
        return
    for holder in stack[0].modules():
        for name, child in holder.named_children():
            if "attention" in type(child).__name__.lower() and "Layer" not in type(child).__name__:
                setattr(holder, name, kind(child))
                return


PLACES = [(True, "layer"), (False, "layer"), (True, "attention"), (False, "attention")]
KINDS = [parts.Shifts, parts.Centres, parts.Attends]
MIXED = [
    (t, place, kind, w)
    for t, place, w, kind in alternating(alternating(crossed(TYPES, PLACES), WHEN), KINDS)
]


@table([
    Property("a thin subclass", [(t, passes_all_on) for t in TYPES], subclass, CALLS, WHEN, make=make),
    Property("a part of one half that mixes tokens", MIXED, in_half, CALLS, make=make),
])  # fmt: skip
def test_an_encoder_decoder(subject, case):
    subject.hold(*case)


@pytest.mark.parametrize("half", ["get_encoder", "get_decoder"])
def test_a_half_alone_is_served_or_refused(half):
    """Whatever `enable` accepts can be called."""
    verdict(lambda: getattr(make("bart"), half)(), Call(labels=None).both)

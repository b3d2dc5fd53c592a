"""Unfamiliar encoder-decoders: subclasses, replaced and patched parts, halves that are enabled on their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopack
from autopack.errors import AutopackError
from tests.encoder_decoder.pairs import Pairs
from tests.unfamiliar import parts
from tests.unfamiliar.common import (
    FLOAT32,
    LEAK,
    Calls,
    Result,
    alternating,
    build,
    check,
    crossed,
    errors,
    exact_or_refused,
    gradients,
    must_be_exact,
    subclass,
)
from tests.unfamiliar.test_subclasses import logged, names_some, passes_all_on

pytestmark = pytest.mark.sampled(2)

TYPES = ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "plbart")
WHEN = ("before", "after")
PAIRS = Pairs.draw((5, 7, 4), (3, 6, 4))


def _result(model: Any, output: Any, form: str) -> Result:
    documents = PAIRS.of(form, output.logits)
    output.loss.backward()
    # T5 computes its norms and its softmax in float32.
    return Result(documents, output.loss, gradients(model), FLOAT32)


def packed(model: Any) -> Result:
    return _result(model, model(**PAIRS.one_row()), "one_row")


def padded(model: Any) -> Result:
    return _result(model, model(**PAIRS.padded()), "padded")


def alone(model: Any) -> Result:
    """Each document with its source and its target alone."""
    outputs = [
        model(input_ids=source[None], labels=target[None])
        for source, target in zip(PAIRS.sources, PAIRS.targets, strict=True)
    ]
    counts = [len(target) for target in PAIRS.targets]
    loss = sum(output.loss * n / sum(counts) for output, n in zip(outputs, counts, strict=True))
    loss.backward()
    return Result([output.logits[0] for output in outputs], loss, gradients(model), FLOAT32)


CALLS: Calls = ((packed, alone), (padded, padded))


def make(model_type: str) -> Any:
    return partial(build, model_type, "seq2seq")


@pytest.mark.parametrize("model_type", TYPES)
def test_the_control_leaks(model_type):
    """A row of several documents of which nothing is said mixes them."""
    model = make(model_type)()
    row = {name: value for name, value in PAIRS.one_row().items() if "mask" not in name}
    assert errors(_result(model, model(**row), "one_row"), alone(model))["states"] > LEAK
    check(padded(model), alone(model))


THIN = (passes_all_on, names_some, logged(passes_all_on))


@pytest.mark.parametrize(("model_type", "forward"), crossed(TYPES, THIN, 1))
def test_thin_subclasses_are_exact(model_type, forward):
    must_be_exact(make(model_type), CALLS, lambda model: subclass(model, forward))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", TYPES[:4])
def test_a_subclass_that_uses_its_own_logits(model_type):
    """A convolution over the target's tokens, in what looks like a thin subclass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super(type(self), self).forward(*args, **kwargs)
        output.logits = output.logits + nn.functional.pad(output.logits, (0, 0, 1, 0))[:, :-1]
        return output

    exact_or_refused(make(model_type), CALLS, lambda model: subclass(model, forward, type(model).__name__))


def in_half(decodes: bool, kind: Any, where: str) -> Any:
    """Puts a part of one half inside a module of the user's."""

    def change(model: Any) -> None:
        half = model.get_decoder() if decodes else model.get_encoder()
        stack = next(m for m in half.modules() if isinstance(m, nn.ModuleList))
        if where == "layer":
            stack[0] = kind(stack[0])
            return
        for holder in stack[0].modules():
            for name, child in holder.named_children():
                if "attention" in type(child).__name__.lower() and "Layer" not in type(child).__name__:
                    setattr(holder, name, kind(child))
                    return

    return change


PLACES = [(True, "layer"), (False, "layer"), (True, "attention"), (False, "attention")]


KINDS = [parts.Shifts, parts.Centres, parts.Attends]


@pytest.mark.parametrize(
    ("model_type", "place", "when", "kind"), alternating(alternating(crossed(TYPES, PLACES, 2), WHEN), KINDS)
)
def test_a_part_of_one_half_mixes_tokens(model_type, place, when, kind):
    decodes, where = place
    exact_or_refused(make(model_type), CALLS, in_half(decodes, kind, where), when)


@pytest.mark.parametrize("name", ["WhisperEncoder", "T5EncoderModel", "BartEncoder", "BartDecoder"])
def test_a_half_alone_is_served_or_refused(name):
    """Whatever `enable` accepts can be called."""
    if name == "WhisperEncoder":
        config = transformers.WhisperConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32,
            num_mel_bins=8, max_source_positions=16, vocab_size=64, pad_token_id=0,
        )  # fmt: skip
        model = transformers.models.whisper.modeling_whisper.WhisperEncoder(config).eval()
        given = {"input_features": torch.randn(1, 8, 32)}
    else:
        whole = build("t5" if name.startswith("T5") else "bart", "seq2seq")
        if name == "T5EncoderModel":
            model = transformers.T5EncoderModel(whole.config).double().eval()
        else:
            model = whole.get_encoder() if name == "BartEncoder" else whole.get_decoder()
        given = PAIRS.padded()
        given = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], "use_cache": False}
        if name != "BartDecoder":
            given.pop("use_cache")
    expected = model(**given).last_hidden_state
    try:
        autopack.enable(model)
    except AutopackError:
        return
    try:
        found = model(**given).last_hidden_state
        real = given.get("attention_mask", torch.ones(found.shape[:2])).bool()
        assert torch.allclose(found[real], expected[real], atol=1e-6)
    finally:
        autopack.disable(model)

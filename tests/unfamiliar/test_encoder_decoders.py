"""Unfamiliar encoder-decoders: subclasses, replaced and patched parts, halves that are enabled on their own."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import autopack
from autopack.errors import AutopackError
from tests.encoder_decoder.pairs import Pairs
from tests.engine import FLOAT32, WHEN, Calls, Property, Result, mean_loss, table
from tests.subjects import alternating, build, crossed, subclass
from tests.unfamiliar import parts
from tests.unfamiliar.test_subclasses import logged, names_some, passes_all_on

TYPES = ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "plbart")
PAIRS = Pairs.draw((5, 7, 4), (3, 6, 4))


def _result(model, form, row):
    output = model(**row)
    # T5 computes its norms and its softmax in float32.
    return Result.of(model, PAIRS.of(form, output.logits), output.loss, FLOAT32)


def packed(model):
    return _result(model, "one_row", PAIRS.one_row())


def undeclared(model):
    """A row of several documents of which nothing is said."""
    return _result(model, "one_row", {name: v for name, v in PAIRS.one_row().items() if "mask" not in name})


def padded(model):
    return _result(model, "padded", PAIRS.padded())


def alone(model):
    """Each document with its source and its target alone."""
    outputs = [
        model(input_ids=source[None], labels=target[None])
        for source, target in zip(PAIRS.sources, PAIRS.targets, strict=True)
    ]
    loss = mean_loss([output.loss for output in outputs], [len(target) for target in PAIRS.targets])
    return Result.of(model, [output.logits[0] for output in outputs], loss, FLOAT32)


CALLS: Calls = ((packed, alone, undeclared), (padded, padded))


def make(model_type, *_):
    return build(model_type, "seq2seq")


def adds_the_token_before(self, *args, **kwargs):
    """A convolution over the target's tokens, in what looks like a thin subclass."""
    output = super(type(self), self).forward(*args, **kwargs)
    output.logits = parts.shifted(output.logits)
    return output


def in_half(model, place, kind):
    """Put a part of one half inside a module of the user's."""
    decodes, where = place
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


PLACES = [(True, "layer"), (False, "layer"), (True, "attention"), (False, "attention")]
KINDS = [parts.Shifts, parts.Centres, parts.Attends]
THIN = (passes_all_on, names_some, logged(passes_all_on))
MIXED = [(t, place, kind, w) for t, place, w, kind in alternating(alternating(crossed(TYPES, PLACES), WHEN), KINDS)]


@table([
    Property("a thin subclass", crossed(TYPES, THIN, 1), subclass, CALLS, WHEN, make=make),
    Property("a subclass that uses its own logits", TYPES[:4],
             lambda model: subclass(model, adds_the_token_before, type(model).__name__), CALLS, make=make),
    Property("a part of one half that mixes tokens", MIXED, in_half, CALLS, make=make),
])  # fmt: skip
def test_an_encoder_decoder(subject, case):
    subject.hold(*case)


@pytest.mark.sampled(2)
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

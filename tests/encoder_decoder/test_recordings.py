"""Recordings with packed texts: the encoder runs one recording per document, and only the decoder's
share rows."""

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from tests.encoder_decoder.pairs import (
    LOGITS,
    TARGETS,
    Pairs,
    check,
    covered,
    of_outputs,
    pad,
    result,
    worst,
)
from tests.support.refusals import refused

pytestmark = covered


KINDS = {
    "whisper": (
        transformers.WhisperForConditionalGeneration,
        {"num_mel_bins": 8, "max_source_positions": 20},
        "input_features",
        (8, 40),
    ),
    "moonshine": (transformers.MoonshineForConditionalGeneration, {}, "input_values", (4000,)),
    "speech_to_text": (
        transformers.Speech2TextForConditionalGeneration,
        {"input_feat_per_channel": 8, "conv_channels": 32, "max_source_positions": 60},
        "input_features",
        (40, 8),
    ),
}
"""Of each type its class, its sizes, and of recordings their name and shape."""


def with_recordings(model_type="whisper"):
    """A model, the name of recordings, and one for each document."""
    cls, fields, name, shape = KINDS[model_type]
    generator = torch.Generator().manual_seed(0)
    return (
        cls(tiny.config(model_type, **fields)).eval(),
        name,
        [torch.randn(1, *shape, generator=generator) for _ in TARGETS],
    )


@pytest.mark.parametrize("model_type", KINDS)
def test_recordings_with_packed_texts(model_type):
    """The encoder runs as it is, on one recording per document; only the decoder's documents share
    rows."""
    model, name, recordings = with_recordings(model_type)
    pairs = Pairs.draw()
    calls = zip(recordings, pairs.targets, strict=True)
    expected = of_outputs(model, [model(**{name: r}, labels=t[None]) for r, t in calls], pairs)
    autopack.enable(model, verify=False)
    batch = torch.cat(recordings)
    for form in ("one_row", "two_rows", "padded"):
        output = model(**{name: batch}, **texts_of(getattr(pairs, form)()))
        check(result(model, pairs, form, output), expected, form)
    with refused("halves-disagree"):
        model(**{name: batch[:3]}, **texts_of(pairs.one_row()))


def texts_of(call):
    return {
        name: value for name, value in call.items() if name in ("labels", "decoder_attention_mask")
    }


def test_recordings_of_unequal_length():
    """What of a recording is padding is not attended to; the encoder's convolutions read it, as
    they do in stock."""
    model, name, _ = with_recordings("speech_to_text")
    pairs, frames = Pairs.draw(), (40, 24, 33, 16)
    batch = {
        name: pad(
            [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in frames], 0
        ),
        "attention_mask": pad([torch.ones(n, dtype=torch.long) for n in frames], 0),
    }
    padded = model(**batch, labels=pairs.padded()["labels"], use_cache=False)
    autopack.enable(model, verify=False)
    for form in ("one_row", "padded"):
        output = model(**batch, **texts_of(getattr(pairs, form)()))
        assert worst(pairs.of(form, output.logits), pairs.of("padded", padded.logits)) <= LOGITS

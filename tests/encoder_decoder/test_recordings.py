"""Recordings with packed texts: the encoder runs one recording per document, and only the decoder's share rows."""

import pytest
import torch
import transformers

import autopack
from tests.encoder_decoder.pairs import LOGITS, TARGETS, Pairs, check, covered, of_outputs, pad, result, worst
from tests.support.refusals import refused

pytestmark = covered


_SIZES = {
    "vocab_size": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "max_target_positions": 64,
}  # fmt: skip


def _recordings(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, *shape, generator=generator) for _ in TARGETS]


def whisper():
    config = transformers.WhisperConfig(
        **_SIZES, num_mel_bins=8, max_source_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), "input_features", _recordings(8, 40)


def _moonshine():
    config = transformers.MoonshineConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.MoonshineForConditionalGeneration(config), "input_values", _recordings(4000)


def _speech_to_text():
    config = transformers.Speech2TextConfig(
        **_SIZES, input_feat_per_channel=8, conv_channels=32, dropout=0.0, max_source_positions=60, pad_token_id=1,
        decoder_start_token_id=2,
    )  # fmt: skip
    return transformers.Speech2TextForConditionalGeneration(config), "input_features", _recordings(40, 8)


@pytest.mark.parametrize("build", [whisper, _moonshine, _speech_to_text])
def test_recordings_with_packedtexts_of(build):
    """The encoder runs as it is, on one recording per document; only the decoder's documents share rows."""
    torch.manual_seed(0)
    model, name, recordings = build()
    model.eval()
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
    return {name: value for name, value in call.items() if name in ("labels", "decoder_attention_mask")}


def test_recordings_of_unequal_length():
    """What of a recording is padding is not attended to; the encoder's convolutions read it, as they do in stock."""
    model, name, _ = _speech_to_text()
    model.eval()
    pairs, frames = Pairs.draw(), (40, 24, 33, 16)
    batch = {
        name: pad([torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in frames], 0),
        "attention_mask": pad([torch.ones(n, dtype=torch.long) for n in frames], 0),
    }
    padded = model(**batch, labels=pairs.padded()["labels"], use_cache=False)
    autopack.enable(model, verify=False)
    for form in ("one_row", "padded"):
        output = model(**batch, **texts_of(getattr(pairs, form)()))
        assert worst(pairs.of(form, output.logits), pairs.of("padded", padded.logits)) <= LOGITS

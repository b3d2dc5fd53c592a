"""Recordings with packed texts: the encoder runs one recording per document, and only the decoder's share rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import autopack
from tests.encoder_decoder.pairs import LOGITS, TARGETS, Alone, Pairs, covered, named_gradients, pad
from tests.support.refusals import refused

pytestmark = covered


def _whisper() -> tuple[Any, str, list[torch.Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=128, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, d_model=64, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=20,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    recordings = [torch.randn(1, 8, 40, generator=generator) for _ in TARGETS]
    return transformers.WhisperForConditionalGeneration(config), "input_features", recordings


def _moonshine() -> tuple[Any, str, list[torch.Tensor]]:
    config = transformers.MoonshineConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    recordings = [torch.randn(1, 4000, generator=generator) for _ in TARGETS]
    return transformers.MoonshineForConditionalGeneration(config), "input_values", recordings


def _speech_to_text() -> tuple[Any, str, list[torch.Tensor]]:
    config = transformers.Speech2TextConfig(
        vocab_size=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        d_model=64, encoder_ffn_dim=96, decoder_ffn_dim=96, input_feat_per_channel=8, conv_channels=32, dropout=0.0,
        max_source_positions=60, max_target_positions=64, pad_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    recordings = [torch.randn(1, 40, 8, generator=generator) for _ in TARGETS]
    return transformers.Speech2TextForConditionalGeneration(config), "input_features", recordings


@pytest.mark.parametrize("build", [_whisper, _moonshine, _speech_to_text])
def test_recordings_with_packed_texts(build):
    """The encoder runs as it is, on one recording per document; only the decoder's documents share rows."""
    torch.manual_seed(0)
    model, name, recordings = build()
    model.eval()
    pairs = Pairs.draw()
    alone = [model(**{name: r}, labels=t[None]) for r, t in zip(recordings, pairs.targets, strict=True)]
    counts = [len(t) for t in pairs.targets]
    loss = sum(o.loss * n for o, n in zip(alone, counts, strict=True)) / sum(counts)
    loss.backward()
    wanted = Alone([o.logits[0].detach() for o in alone], loss.detach(), named_gradients(model))
    autopack.enable(model, verify=False)
    batch = torch.cat(recordings)
    for form in ("one_row", "two_rows", "padded"):
        wanted.check(pairs, form, model(**{name: batch}, **_texts(getattr(pairs, form)())), model)
    with refused("halves-disagree", match="found 3 of them and 4 documents"):
        model(**{name: batch[:3]}, **_texts(pairs.one_row()))


def _texts(call: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    stock = Alone(pairs.of("padded", padded.logits.detach()), padded.loss.detach(), {})
    autopack.enable(model, verify=False)
    for form in ("one_row", "padded"):
        output = model(**batch, **_texts(getattr(pairs, form)()))
        assert stock.error(pairs.of(form, output.logits.detach())) <= LOGITS

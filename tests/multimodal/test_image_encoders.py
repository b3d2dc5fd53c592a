"""Encoders that take images and decoders that take text: an image for each document, whose texts
share rows."""

import copy

import pytest
import transformers

from autopack import tiny
from autopack.tiny.models import randomize
from compat.images import documents
from tests.multimodal.models import (
    agrees,
    serves,
)

TYPES = ["pix2struct", "pp_formulanet", "vision-encoder-decoder"]


def with_decoder(kind, **fields):
    """A VisionEncoderDecoder with another decoder."""
    encoder = tiny.config("vision-encoder-decoder", task="image-text-to-text").encoder
    decoder = tiny.config(kind, is_decoder=True, add_cross_attention=True, **fields)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        copy.deepcopy(encoder), decoder
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model = transformers.VisionEncoderDecoderModel(config)
    randomize(model, 0)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("trocr", {}),
        ("trocr", {"use_learned_position_embeddings": False}),
        ("mbart", {}),
        ("gpt2", {}),
        ("roberta", {}),
    ],
)
def test_other_decoders(kind, fields):
    """Which number tokens in ways of their own; padding tokens may stand in a document."""
    stock, model = with_decoder(kind, **fields), with_decoder(kind, **fields)
    agrees(model, stock)
    found = documents(stock)
    for document in found:
        document.tokens["decoder_input_ids"][0, 2] = 1
    serves(model, stock, [found])

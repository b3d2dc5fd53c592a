"""Encoders that take images and decoders that take text: an image for each document, whose texts
share rows."""

import copy

import pytest
import transformers

from autopack import tiny
from autopack.tiny.models import randomize
from compat.images import documents
from tests.conftest import FLOAT32
from tests.multimodal.models import (
    agrees,
    padded,
    serves,
    twins_with_images,
    unpadded_as_stock,
    worst,
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


@pytest.mark.parametrize("model_type", TYPES)
def test_padded_batches_give_what_they_gave(model_type):
    stock, model = twins_with_images(model_type)
    found = documents(stock)
    output = unpadded_as_stock(
        model, stock, padded(stock, found), verify=False
    )  # which has seen no padding beside images
    assert worst(output.logits, stock, [[document] for document in found]) <= FLOAT32

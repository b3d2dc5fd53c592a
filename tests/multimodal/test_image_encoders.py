"""Encoders that take images and decoders that take text: an image for each document, whose texts
share rows."""

import copy

import pytest
import transformers

import autopack
from autopack import tiny
from autopack.tiny.models import randomize
from compat.images import documents, packed
from tests.conftest import FLOAT32
from tests.multimodal.models import (
    agrees,
    padded,
    serves,
    twins_with_images,
    unpadded_as_stock,
    with_images,
    worst,
)
from tests.support.refusals import refused

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


@pytest.mark.parametrize("model_type", TYPES)
def test_as_many_images_as_documents(model_type):
    model = with_images(model_type)
    found = documents(model)
    call = packed(model, [found])
    fewer = {name: call[name][:2] for name in found[0].images[0]}
    with (
        autopack.enable(model),
        refused("halves-disagree"),
    ):
        model(**{**call, **fewer})


class TestPPFormulaNet:
    """It shifts `input_ids` over the row where it gets no tokens for its decoder."""

    def test_tokens_that_it_would_shift(self):
        model = with_images("pp_formulanet")
        call = packed(model, [documents(model)])
        ids, mask = call.pop("decoder_input_ids"), call.pop("decoder_attention_mask")
        with autopack.enable(model):
            with refused("halves-disagree"):
                model(**call, input_ids=ids, attention_mask=mask)
            with refused("decoder-tokens"):
                model(
                    **call,
                    input_ids=ids,
                    attention_mask=mask,
                    labels=ids,
                    decoder_attention_mask=mask,
                )
            with refused("decoder-tokens"):
                model(**call, labels=ids, decoder_attention_mask=mask)

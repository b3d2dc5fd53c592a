"""BLIP and GIT: one image for each document, of which its tokens say nothing: across from it, or
before it."""

import copy

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.tiny.images import IMAGE
from autopack.tiny.models import randomize
from compat.images import alone, documents, packed, spans
from tests.conftest import FLOAT32, LEAK, error, gradients
from tests.multimodal.models import (
    agrees,
    padded,
    serves,
    twins_with_images,
    worst,
)
from tests.support.refusals import refused

TYPES = ["blip", "git"]


def twins(model_type):
    return twins_with_images(model_type, attn_implementation="eager")


@pytest.mark.parametrize(
    "model_type", [*TYPES, "pix2struct", "pp_formulanet", "vision-encoder-decoder"]
)
def test_stock_lets_documents_of_a_row_share_an_image(model_type):
    """Negative control: documents beside the image of the first, and images in another order."""
    stock, model = twins(model_type)
    found = documents(stock)
    call = packed(model, [found])
    pictures = {name: value for name, value in call.items() if name in found[0].images[0]}
    first = {name: value for name, value in call.items() if name in found[0].tokens}
    first |= {name: value[:1] for name, value in pictures.items()}
    plain = stock(**first, use_cache=False).logits[:, -sum(map(len, found)) :]
    with autopack.enable(model):
        turned = model(
            **{**call, **{name: value.flip(0) for name, value in pictures.items()}}
        ).logits
    assert worst(plain, stock, [found]) > LEAK
    assert worst(turned, stock, [found]) > (LEAK if model_type in TYPES else 20 * FLOAT32)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", TYPES)
def test_padded_batches_give_what_they_gave(model_type, side):
    stock, model = twins(model_type)
    found = documents(stock)
    call = padded(stock, found, side) | {"use_cache": False}
    expected = stock(**call)
    expected.loss.backward()
    with autopack.enable(model):
        output = model(**call)
        output.loss.backward()
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)
    assert all(torch.equal(*pair) for pair in zip(gradients(model), gradients(stock), strict=True))


def test_hidden_states_of_git_are_those_of_its_text():
    stock, model = twins("git")
    found = documents(stock)
    with autopack.enable(model):
        states = model(**packed(model, [found]), output_hidden_states=True).hidden_states
    for document, row, a, b in spans([found]):
        own = alone(stock, document, output_hidden_states=True).hidden_states
        for mine, theirs in zip(states, own, strict=True):
            assert error(mine[row, a:b], theirs[0, -len(document) :]) <= FLOAT32


# Encoders that take images and decoders that take text: an image for each document, whose texts
# share rows.


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


# Models that take no text without images: those with a Q-Former, and Kosmos-2. Each document has an
# image.

CLASSES = {
    "blip-2": "Blip2ForConditionalGeneration",
    "instructblip": "InstructBlipForConditionalGeneration",
    "instructblipvideo": "InstructBlipVideoForConditionalGeneration",
}


@pytest.mark.parametrize("model_type", CLASSES)
def test_an_encoder_decoder_in_the_place_of_the_language_model_is_refused(model_type):
    """As in BLIP-2 with Flan-T5."""
    config = tiny.config(model_type, task="image-text-to-text")
    derived = ("text_config", "is_encoder_decoder", "use_decoder_only_language_model")
    fields = {name: value for name, value in config.to_dict().items() if name not in derived}
    text = {**tiny.config("t5", task="seq2seq").to_dict(), "model_type": "t5"}
    model = getattr(transformers, CLASSES[model_type])(type(config)(**fields, text_config=text))
    with refused("cannot-be-packed"):
        autopack.enable(model, verify=False)


def test_a_q_former_with_as_many_tokens_as_the_row_has():
    """Upstream hands positions on to it, by `**kwargs`; they would fit there, and number its tokens
    by documents."""
    stock, model = twins_with_images("instructblipvideo")
    first, second = documents(stock, [(3, IMAGE), (IMAGE, 4)])
    ids = tiny.tokens(stock.config, 1, len(first) + len(second), seed=5)
    for document in (first, second):
        document.images[0].update(
            qformer_input_ids=ids, qformer_attention_mask=torch.ones_like(ids)
        )
    serves(model, stock, [[first, second]], verify=False)

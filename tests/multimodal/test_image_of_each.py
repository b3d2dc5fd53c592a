"""BLIP and GIT: one image for each document, of which its tokens say nothing: across from it, or
before it."""

import pytest
import torch

import autopack
from compat.images import alone, documents, packed, spans
from tests.conftest import FLOAT32, LEAK, error, gradients
from tests.multimodal.models import (
    padded,
    twins_with_images,
    worst,
)

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

"""Padded batches of documents with images give what they gave, run as packed rows inside or left as
they came."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import autopack
from autopack.tiny.images import IMAGE
from compat.images import DOCUMENTS, documents
from tests.conftest import FLOAT32, LEAK, error
from tests.multimodal.models import PARTS, padded, same_loss, twins_with_images, unpadded_as_stock

OUTSIDE = ["gemma3", "gemma4", "gemma4_unified", "paligemma"]
"""Types whose masks are made outside of the text model, so that whole models run one row with the
images."""
PADDED = {
    **dict.fromkeys(("qwen2_vl", "qwen3_5", "minicpmv4_7", "llava", *OUTSIDE), PARTS),
    "mllama": [(5,), (9,), (7,)],
    # A decoder takes text, an encoder the image of each document.
    **dict.fromkeys(("pix2struct", "pp_formulanet", "vision-encoder-decoder"), DOCUMENTS),
}
SIDES = [
    (name, side)
    for name, parts in PADDED.items()
    for side in ("right", "left")
    if side == "right" or parts is not DOCUMENTS
]


@pytest.mark.parametrize(("model_type", "side"), SIDES)
def test_padded_batches_with_images_give_what_they_gave(model_type, side):
    stock, model = twins_with_images(model_type)
    parts = PADDED[model_type]
    call = padded(stock, documents(stock, parts), side)
    stock.train()
    model.train()
    if not (model_type in ("qwen3_5", "minicpmv4_7") and side == "left"):
        # no audit has seen padding beside images of an encoder
        unpadded_as_stock(model, stock, call, verify=parts is not DOCUMENTS)
        return
    with autopack.enable(model) as handle:  # stock carries a state out of left padding
        model(**call).loss.backward()
        assert handle.tally.batches == 1


def test_a_label_after_padding_keeps_a_batch_of_images_as_it_came():
    """The text model would be unpadded, and the head above it would predict that label from
    zeros."""
    stock, model = twins_with_images("llava")
    call = padded(stock, documents(stock, PARTS), "left")
    real = (call["input_ids"] < 100) & (call["attention_mask"] == 1)
    call |= {"labels": torch.where(real, call["input_ids"], -100), "use_cache": False}
    with autopack.enable(model) as handle:
        found = model(**call).loss
        assert handle.enabled.tally.batches == 0
        assert any("predicted at padding" in reason for reason in handle.enabled.tally.left)
    assert torch.equal(found, stock(**call).loss)


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_one_image_in_the_whole_batch(model_type):
    """As many as there are rows of tokens, without being something of that row."""
    stock, model = twins_with_images(model_type)
    unpadded_as_stock(model, stock, padded(stock, documents(model, [(3, IMAGE, 2), (11,)])))


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_images_of_the_rows_stay_with_them(model_type):
    """Negative control: with the images in another order it is another batch, also without its
    padding."""
    stock, model = twins_with_images(model_type)
    call = padded(stock, documents(stock, PARTS)) | {"labels": None, "use_cache": False}
    turned = {
        name: value.flip(0) for name, value in call.items() if name.startswith(("pixel", "image"))
    }
    expected, real = stock(**call).logits, call["attention_mask"].bool()
    with autopack.enable(model):
        found, other = (model(**{**call, **change}).logits for change in ({}, turned))
    assert error(found[real], expected[real]) <= FLOAT32
    assert error(other[real], expected[real]) > LEAK


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_a_tuple_of_results(model_type):
    """States of images have no name in it by which they are told from those of tokens: the model
    inside is unpadded."""
    stock, model = twins_with_images(model_type)
    call = padded(stock, documents(stock, PARTS)) | {"return_dict": False, "use_cache": False}
    real = call["attention_mask"].bool()
    with autopack.enable(model):
        found = model(**call)
    expected = stock(**call)
    assert len(found) == len(expected)
    same_loss(found[0], expected[0])
    assert error(found[1][real], expected[1][real]) <= FLOAT32
    # one tensor of states, or from 5.24 a tuple with several
    for states, of_stock in zip(*map(tree_leaves, (found[2], expected[2])), strict=True):
        assert error(states, of_stock) <= FLOAT32

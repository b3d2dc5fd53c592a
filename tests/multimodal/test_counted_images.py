"""HunYuan-VL numbers the images of a batch over all its rows: each document is numbered by itself,
in any batch."""

import pytest
import torch

import autopack
from autopack.tiny.images import IMAGE
from compat.images import alone, documents
from tests.conftest import FLOAT32, error
from tests.multimodal.models import PARTS, padded, rows_as_alone, twins_with_images, with_images


def padded_with_images(model, side):
    return padded(model, documents(model, PARTS), side) | {"labels": None}


def test_the_number_of_an_image_counts():
    """Negative control: as right-padded rows of one call, upstream gives a document's images those
    of all before."""
    stock = with_images("hunyuan_vl")
    found = documents(stock, PARTS)
    logits = stock(**padded_with_images(stock, "right"), use_cache=False).logits
    assert error(logits[0, : len(found[0])], alone(stock, found[0]).logits[0]) <= FLOAT32
    assert error(logits[1, : len(found[1])], alone(stock, found[1]).logits[0]) > 20 * FLOAT32


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_get_what_they_get_alone(side):
    stock, model = twins_with_images("hunyuan_vl")
    found = documents(stock, PARTS)
    assert rows_as_alone(model, stock, found, side).batches
    assert model.model.rope_deltas is None


def test_a_batch_without_padding_too():
    stock, model = twins_with_images("hunyuan_vl")
    assert not rows_as_alone(model, stock, documents(stock, [(3, IMAGE, 2)]) * 2, "right").batches


def test_positions_of_the_call_are_taken_as_they_are():
    stock, model = twins_with_images("hunyuan_vl")
    call = padded_with_images(stock, "right")
    given = (
        call[name]
        for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    )
    positions = stock.model.get_rope_index(*given)[0]
    expected = stock(**call, use_cache=False).logits
    with autopack.enable(model):
        found = model(**call, position_ids=positions, use_cache=False).logits
    real = call["attention_mask"].bool()
    assert error(found[real], expected[real]) <= FLOAT32


def test_generation_is_stocks():
    stock, model = twins_with_images("hunyuan_vl")
    call = {**padded_with_images(stock, "left"), "max_new_tokens": 4, "do_sample": False}
    del call["labels"]
    expected = stock.generate(**call)
    with autopack.enable(model):
        assert torch.equal(model.generate(**call), expected)

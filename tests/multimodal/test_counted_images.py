"""HunYuan-VL numbers the images of a batch over all its rows: each document is numbered by itself, in any batch."""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack.tiny.images import IMAGE
from compat.images import alone, compare, documents, packed, spans
from tests.conftest import FLOAT32, error, gradients
from tests.multimodal.models import twins_with_images, with_images
from tests.multimodal.test_packed_rows import hold
from tests.multimodal.test_padded_batches import padded_with_images
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PARTS = [(3, IMAGE, 2), (IMAGE, 9, IMAGE, 4), (7,)]
"""What `padded_with_images` makes."""


def test_documents_with_images_get_what_they_get_alone():
    stock, model = twins_with_images("hunyuan_vl")
    with autopack.enable(model):
        hold(compare(model, stock))


def test_the_number_of_an_image_counts():
    """Negative control: as right-padded rows of one call, upstream gives a document's images those of all before."""
    stock = with_images("hunyuan_vl")
    found = documents(stock, PARTS)
    call, mask = padded_with_images(stock, "right")
    logits = stock(**call, attention_mask=mask, use_cache=False).logits
    assert error(logits[0, : len(found[0])], alone(stock, found[0]).logits[0]) <= FLOAT32
    assert error(logits[1, : len(found[1])], alone(stock, found[1]).logits[0]) > 20 * FLOAT32


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_get_what_they_get_alone(side):
    stock, model = twins_with_images("hunyuan_vl")
    found = documents(stock, PARTS)
    call, mask = padded_with_images(stock, side)
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    if side == "left":
        labels[:, 1:][mask[:, :-1] == 0] = -100
    with autopack.enable(model) as handle:
        output = model(**call, attention_mask=mask, labels=labels, use_cache=False)
        output.loss.backward()
        assert handle.enabled.tally.batches
        assert model.model.rope_deltas is None
    expected = [alone(stock, document).logits[0] for document in found]
    for row, own in enumerate(expected):
        assert error(output.logits[row, mask[row].bool()], own) <= FLOAT32
    shifted = (
        torch.cat([own[:-1] for own in expected]),
        torch.cat([d[m.bool()][1:] for d, m in zip(labels, mask, strict=True)]),
    )
    loss = torch.nn.functional.cross_entropy(*shifted)
    loss.backward()
    assert float(output.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-4)
    for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 + 1e-3 * theirs.abs().max()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_that_is_to_stay_gets_what_stock_gives(side):
    stock, model = twins_with_images("hunyuan_vl")
    call, mask = padded_with_images(stock, side)
    with autopack.enable(model, unpad=False):
        assert torch.equal(
            model(**call, attention_mask=mask, use_cache=False).logits,
            stock(**call, attention_mask=mask, use_cache=False).logits,
        )


def test_a_batch_without_padding_too():
    stock, model = twins_with_images("hunyuan_vl")
    found = documents(stock, [(3, IMAGE, 2), (4, IMAGE, 1)])
    twice = [found[0], found[0]]
    call = {name: torch.cat([d.tokens[name] for d in twice]) for name in found[0].tokens}
    call |= {name: torch.cat([d.images[0][name] for d in twice]) for name in found[0].images[0]}
    own = alone(stock, found[0]).logits[0]
    assert error(stock(**call, use_cache=False).logits[1], own) > 20 * FLOAT32
    with autopack.enable(model):
        logits = model(**call, use_cache=False).logits
    assert all(error(row, own) <= FLOAT32 for row in logits)


def test_positions_of_the_call_are_taken_as_they_are():
    stock, model = twins_with_images("hunyuan_vl")
    call, mask = padded_with_images(stock, "right")
    positions = stock.model.get_rope_index(call["input_ids"], call["mm_token_type_ids"], call["image_grid_thw"], mask)[
        0
    ]
    expected = stock(**call, attention_mask=mask, use_cache=False).logits
    with autopack.enable(model):
        found = model(**call, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert error(found[mask.bool()], expected[mask.bool()]) <= FLOAT32


def test_generation_is_stocks():
    stock, model = twins_with_images("hunyuan_vl")
    call, mask = padded_with_images(stock, "left")
    expected = stock.generate(**call, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with autopack.enable(model):
        assert torch.equal(model.generate(**call, attention_mask=mask, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize("change", ["fewer", "in another order"])
def test_grids_that_are_not_those_of_the_documents(change):
    model = with_images("hunyuan_vl")
    found = documents(model)
    call = packed(model, [found])
    grids = call["image_grid_thw"]
    call["image_grid_thw"] = grids[:-1] if change == "fewer" else grids.roll(1, 0)
    assert len(spans([found])) > 2
    with autopack.enable(model), refused("media-positions"):
        model(**call)

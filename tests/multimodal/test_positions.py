"""Positions that a model computes from its images: each document of a packed row is numbered as it
is alone."""

import pytest
import torch

import autopack
from autopack.tiny import media_rows
from autopack.tiny.images import IMAGE
from compat.images import alone, documents, packed, spans
from tests.conftest import FLOAT32, LEAK, error
from tests.multimodal.models import (
    PARTS,
    padded,
    rows_as_alone,
    twins_with_images,
    with_images,
    worst,
)


def test_positions_that_the_call_computed_itself_are_taken():
    stock, model = twins_with_images("qwen2_vl")
    found = documents(stock)
    with autopack.enable(model):
        expected = model(**packed(model, [found])).logits
        call = packed(model, [found])
        text = call.pop("position_ids")
        vision = torch.cat([_own_positions(stock, document) for document in found], dim=2)
        call["position_ids"] = torch.cat([text[None], vision])
        assert torch.equal(model(**call).logits, expected)


M_ROPE = (
    "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe glm4v glm46v glm4v_moe glm_ocr paddleocr_vl".split()
)


@pytest.mark.parametrize("model_type", [*M_ROPE, "qwen3_omni_moe_thinker"])
def test_three_sections_that_begin_anew_keep_documents_apart(model_type):
    """As the model's own function gives them; Qwen3-Omni numbers tokens by floats."""
    stock, model = twins_with_images(model_type)
    found = documents(stock)
    call = packed(stock, [found])
    call["position_ids"] = torch.cat([_own_positions(stock, document) for document in found], dim=2)
    assert call["position_ids"].is_floating_point() == (model_type not in M_ROPE)
    assert worst(stock(**call).logits, stock, [found]) > LEAK
    with autopack.enable(model):
        assert worst(model(**call).logits, stock, [found]) <= FLOAT32


def _own_positions(model, document):
    arguments = media_rows.row(model, [document])
    if model.config.model_type == "qwen3_omni_moe_thinker":
        given = {
            name: arguments[name] for name in ("input_ids", "image_grid_thw") if name in arguments
        }
        return model.get_rope_index(**given, attention_mask=torch.ones_like(given["input_ids"]))[0]
    return model.model.get_rope_index(
        **{n: v for n, v in arguments.items() if n != "pixel_values"}
    )[0]


def test_what_the_model_keeps_for_generation_stays_and_is_not_read():
    stock, model = twins_with_images("qwen2_vl")
    found = documents(stock)
    with autopack.enable(model):
        alone(model, found[3])
        kept = model.model.rope_deltas
        assert int(kept) != 0
        model(**packed(model, [found]))
        assert model.model.rope_deltas is kept
        text = documents(stock, [(5,), (7,)])
        where = packed(stock, [text])["position_ids"]
        embeds = model.get_input_embeddings()(media_rows.row(stock, text)["input_ids"])
        logits = model(inputs_embeds=embeds, position_ids=where).logits
    assert worst(logits, stock, [text]) <= FLOAT32


def test_rotary_embeddings_by_the_longest_position_follow_the_positions_of_each_document():
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mrope_section": [4, 2, 2],
    }
    made = {"text_config": {"rope_parameters": rope, "max_position_embeddings": 8}}
    stock, model = twins_with_images("qwen2_vl", **made)
    found = documents(stock, [(20,), (3, IMAGE, 2), (IMAGE, 9, IMAGE)])
    with autopack.enable(model, verify=False):
        logits = model(**packed(model, [found])).logits
    for document, row, a, b in spans([found]):
        fresh = with_images("qwen2_vl", **made)  # which has seen no longer document
        assert error(logits[row, a:b], alone(fresh, document).logits[0]) <= FLOAT32


# HunYuan-VL numbers the images of a batch over all its rows: each document is numbered by itself,
# in any batch.


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
    found = documents(stock, [(3, IMAGE, 2)]) * 2
    call = padded(stock, found)
    assert call.pop("attention_mask").all()
    with autopack.enable(model):
        logits = model(**call, use_cache=False).logits
    assert error(logits, alone(stock, found[0]).logits.expand_as(logits)) <= FLOAT32


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

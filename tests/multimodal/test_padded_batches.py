"""Padded batches of documents with images give what they gave, run as packed rows inside or left as they came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from autopack.tiny import media_rows
from autopack.tiny.images import IMAGE
from compat.images import documents
from tests.conftest import FLOAT32, LEAK, error, gradients
from tests.multimodal.models import twins_with_images

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


OUTSIDE = ["gemma3", "gemma4", "gemma4_unified", "paligemma"]
"""Types whose masks are made outside of the text model, so that whole models run one row with the images."""
PADDED = ["qwen2_vl", "qwen3_5", "minicpmv4_7", "llava", "mllama", *OUTSIDE]


def padded_with_images(model: Any, side: str) -> tuple[dict[str, Any], torch.Tensor]:
    """A padded batch of three documents with images, and its mask."""
    found = documents(model, [(3, IMAGE, 2), (IMAGE, 9, IMAGE, 4), (7,)])
    columns = max(map(len, found))
    call = media_rows.row(model, found)
    for name in found[0].tokens:
        rows = [d.tokens[name][0] for d in found]
        call[name] = torch.stack([_pad(row, columns, side) for row in rows])
    mask = torch.stack([_pad(torch.ones(len(d), dtype=torch.long), columns, side) for d in found])
    return call, mask


def _pad(row: torch.Tensor, columns: int, side: str) -> torch.Tensor:
    space = columns - len(row)
    return torch.nn.functional.pad(row, (space, 0) if side == "left" else (0, space))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", PADDED)
def test_padded_batches_with_images_give_what_they_gave(model_type, side):
    stock, model = twins_with_images(model_type)
    if model_type == "mllama":
        found = documents_of_text(stock)
        call, mask = {"input_ids": torch.stack([_pad(d, 9, side) for d in found])}, None
        mask = torch.stack([_pad(torch.ones(len(d), dtype=torch.long), 9, side) for d in found])
    else:
        call, mask = padded_with_images(stock, side)
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    if side == "left":  # stock would compare the first token of a document with a prediction made at padding
        labels[:, 1:][mask[:, :-1] == 0] = -100
    stock.train()
    model.train()
    with autopack.enable(model) as handle:
        found = model(**call, attention_mask=mask, labels=labels)
        found.loss.backward()
        tally = handle.enabled.tally
    expected = stock(**call, attention_mask=mask, labels=labels, use_cache=False)
    expected.loss.backward()
    real = mask.bool()
    if not (model_type in ("qwen3_5", "minicpmv4_7") and side == "left"):  # stock carries a state out of left padding
        assert error(found.logits[real], expected.logits[real]) <= FLOAT32
        assert float(found.loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-4)
        for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
            assert (mine - theirs).abs().max() <= 1e-4 + 1e-3 * theirs.abs().max()
    assert tally.batches == 1
    if expected.get("image_hidden_states") is not None:
        assert error(found.image_hidden_states, expected.image_hidden_states) <= FLOAT32


def test_a_label_after_padding_keeps_a_batch_of_images_as_it_came():
    """The text model would be unpadded, and the head above it would predict that label from zeros."""
    stock, model = twins_with_images("llava")
    call, mask = padded_with_images(stock, "left")
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    with autopack.enable(model) as handle:
        found = model(**call, attention_mask=mask, labels=labels, use_cache=False).loss
        assert handle.enabled.tally.batches == 0
        assert any("predicted at padding" in reason for reason in handle.enabled.tally.left)
    assert torch.equal(found, stock(**call, attention_mask=mask, labels=labels, use_cache=False).loss)


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_one_image_in_the_whole_batch(model_type):
    """As many as there are rows of tokens, without being something of that row."""
    stock, model = twins_with_images(model_type)
    found = documents(model, [(3, IMAGE, 2), (11,)])
    columns = max(map(len, found))
    call = media_rows.row(model, found)
    for name in found[0].tokens:
        call[name] = torch.stack([_pad(d.tokens[name][0], columns, "right") for d in found])
    mask = torch.stack([_pad(torch.ones(len(d), dtype=torch.long), columns, "right") for d in found])
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    with autopack.enable(model) as handle:
        output = model(**call, attention_mask=mask, labels=labels)
        tally = handle.enabled.tally
        assert (tally.batches, dict(tally.left)) == (1, {})
    expected = stock(**call, attention_mask=mask, labels=labels)
    assert error(output.logits[mask.bool()], expected.logits[mask.bool()]) <= FLOAT32
    assert output.image_hidden_states.shape == expected.image_hidden_states.shape


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_images_of_the_rows_stay_with_them(model_type):
    """Negative control: with the images in another order it is another batch, also without its padding."""
    stock, model = twins_with_images(model_type)
    call, mask = padded_with_images(stock, "right")
    turned = {name: value.flip(0) for name, value in call.items() if name.startswith(("pixel", "image"))}
    expected = stock(**call, attention_mask=mask, use_cache=False).logits
    with autopack.enable(model):
        found, other = (
            model(**{**call, **change}, attention_mask=mask, use_cache=False).logits for change in ({}, turned)
        )
    real = mask.bool()
    assert error(found[real], expected[real]) <= FLOAT32
    assert error(other[real], expected[real]) > LEAK


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_a_tuple_of_results(model_type):
    """States of images have no name in it by which they are told from those of tokens: the model inside is unpadded."""
    stock, model = twins_with_images(model_type)
    call, mask = padded_with_images(stock, "right")
    call |= {"labels": torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)}
    with autopack.enable(model):
        found = model(**call, attention_mask=mask, return_dict=False, use_cache=False)
    expected = stock(**call, attention_mask=mask, return_dict=False, use_cache=False)
    assert len(found) == len(expected)
    assert float(found[0].detach()) == pytest.approx(float(expected[0].detach()), rel=1e-4)
    assert error(found[1][mask.bool()], expected[1][mask.bool()]) <= FLOAT32
    assert error(found[2], expected[2]) <= FLOAT32


def documents_of_text(model: Any) -> list[torch.Tensor]:
    return [tiny.tokens(model.config, 1, n, seed=n)[0] for n in (5, 9, 7)]

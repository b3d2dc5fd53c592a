"""Padded batches of documents with images give what they gave, run as packed rows inside or left as they came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from autopack.tiny import images
from autopack.tiny.images import IMAGE
from compat.images import documents
from tests.conftest import FLOAT32, error, gradients
from tests.multimodal.models import twins_with_images

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


PADDED = ["qwen2_vl", "qwen3_5", "minicpmv4_7", "gemma3", "llava", "paligemma", "mllama"]


def padded_with_images(model: Any, side: str) -> tuple[dict[str, Any], torch.Tensor]:
    """A padded batch of three documents with images, and its mask."""
    found = documents(model, [(3, IMAGE, 2), (IMAGE, 9, IMAGE, 4), (7,)])
    columns = max(map(len, found))
    call = images.row(model, found)
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
    if model_type in ("gemma3", "paligemma"):  # their masks are made before the text model: nothing left to unpad
        assert tally.batches == 0
        assert sum(tally.left.values()) >= 1
    else:
        assert tally.batches == 1


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


def documents_of_text(model: Any) -> list[torch.Tensor]:
    return [tiny.tokens(model.config, 1, n, seed=n)[0] for n in (5, 9, 7)]

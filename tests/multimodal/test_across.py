"""Mllama and Idefics: text attends to images across, and each document, or row of a batch, reads
its own alone."""

import pytest
import torch

import autopack
from autopack import PackingCollator
from autopack.tiny import images, media_rows
from autopack.tiny.images import IMAGE
from autopack.tiny.media_rows import Document
from compat.images import alone, documents, packed
from tests.conftest import FLOAT32, LEAK, error
from tests.multimodal.models import (
    PARTS,
    opened,
    padded,
    rows_as_alone,
    same_gradients,
    with_images,
    worst,
)
from tests.support.refusals import refused

MASKS = {"mllama": "cross_attention_mask", "idefics": "image_attention_mask"}


def with_none(model, found):
    """The documents, those without images with an empty one that no token sees, where upstream
    wants pixels."""
    if not images.needs_images(model):
        return found
    like = next(d for d in found if d.images)
    empty = {name: torch.zeros_like(value) for name, value in like.images[0].items()}
    of_tokens = {n: v[:, :1, :1] for n, v in like.seen.items()}
    return [
        d
        if d.images
        else Document(
            d.tokens, (empty,), {n: v.new_zeros(1, len(d), 1) for n, v in of_tokens.items()}
        )
        for d in found
    ]


@pytest.mark.parametrize("model_type", MASKS)
def test_tokens_before_an_image_and_documents_without_one(model_type):
    """Where no token sees anything: upstream lets it see all images of the row, or nothing."""
    stock, model = opened(model_type)
    found = documents(stock, [(3, IMAGE, 2), (2, IMAGE, IMAGE, 3)])
    text = images.document(stock, (7,), seed=5)
    rows = [[found[0], text, found[1]], [found[1], text, found[0]]]
    with autopack.enable(model):
        logits = model(**packed(model, rows)).logits
    assert worst(logits, stock, [with_none(stock, row) for row in rows]) <= FLOAT32


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", MASKS)
def test_rows_of_a_padded_batch_get_what_they_get_alone(model_type, side):
    stock, model = opened(model_type)
    found = documents(stock, PARTS if model_type == "mllama" else PARTS[:2])
    found = with_none(stock, [*found, images.document(stock, (4,), seed=8)])
    tally = rows_as_alone(model, stock, found, side)
    assert tally.left["its text attends to the images of the row"] == 1


def test_stock_lets_rows_of_a_batch_see_what_fills_them_up():
    """Negative control: a row without images beside one with two attends to empty ones, which it
    has not alone.

    So it does with `unpad=False`, which leaves padded batches to stock.
    """
    stock, model = opened("mllama")
    found = documents(stock, PARTS)
    call = padded(stock, found) | {"labels": None}
    logits = stock(**call, use_cache=False).logits
    assert error(logits[2, : len(found[2])], alone(stock, found[2]).logits[0]) > LEAK
    with autopack.enable(model, unpad=False):
        assert torch.equal(model(**call, use_cache=False).logits, logits)


def _showing_another(mask):
    mask = mask.clone()
    mask[:, -1, 0] = 1
    return mask


class TestMasks:
    @pytest.fixture(params=MASKS)
    def call(self, request):
        stock, model = opened(request.param)
        with autopack.enable(model):
            found = documents(stock, [(3, IMAGE, 2), (2, IMAGE, 3)])
            yield model, packed(model, [found]), MASKS[request.param]

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda mask: None, "found none"),
            (lambda mask: mask[:, 1:], None),
            (lambda mask: mask.flip(2), "leaves out images before it, or is not in their order"),
            (_showing_another, "shows it images that other documents see"),
        ],
        ids=[
            "missing",
            "of another form",
            "in another order",
            "that shows the image of another document",
        ],
    )
    def test_that_is_not_of_these_documents(self, call, change, match):
        model, arguments, name = call
        with refused("media-of-others", match=match):
            model(**{**arguments, name: change(arguments[name])})

    def test_attention_weights(self, call):
        model, arguments, _ = call
        with refused("output-asked"):
            model(**arguments, output_attentions=True)


def test_an_image_that_no_token_sees_is_of_no_document():
    stock, model = opened("mllama")
    found = documents(stock, [(3, IMAGE, 2), (2, IMAGE, 3)])
    call = packed(model, [found])
    call["cross_attention_mask"][:, len(found[0]) :] = 0
    with autopack.enable(model):
        with refused("media-of-others"):
            model(**call)
        call["aspect_ratio_ids"][:, 1] = 0  # as processors write those that fill up a row
        logits = model(**call).logits
    rest = Document(found[1].tokens, ())
    assert error(logits[0, len(found[0]) :], alone(stock, rest).logits[0]) <= FLOAT32


def test_checkpointing_reads_the_same_images():
    stock, model = opened("mllama")
    found = documents(stock)
    call = packed(model, [found])
    model.gradient_checkpointing_enable()
    with autopack.enable(model):
        model.train()(**call).logits.sum().backward()
    sum(alone(stock, d).logits.sum() for d in found).backward()
    same_gradients(model, stock)


class TestCollator:
    """What a processor has made of each document becomes packed rows, their masks along the
    diagonal."""

    @staticmethod
    def example(model, document):
        found = {name: value[0].tolist() for name, value in document.tokens.items()}
        return {**found, **media_rows.row(model, [document])}

    @pytest.mark.parametrize("max_length", [None, 24])
    @pytest.mark.parametrize("model_type", MASKS)
    def test_rows_get_what_documents_get_alone(self, model_type, max_length):
        stock, model = opened(model_type)
        found = with_none(
            stock,
            [
                *documents(stock, [(3, IMAGE, 2), (2, IMAGE, 3, IMAGE, 4)]),
                text := images.document(stock, (7,)),
            ],
        )
        found = [*found, found[0]]
        assert not text.images
        collate = PackingCollator.for_model(model, max_length=max_length, labels="none")
        batch = collate([self.example(model, d) for d in found])
        mask = batch[MASKS[model_type]]
        assert mask.shape[:2] == batch["input_ids"].shape
        assert mask.shape[2] == (4 if max_length is None else 3)
        with autopack.enable(model):
            logits = model(**batch).logits
        rows = [[]]
        for document in found:
            if sum(map(len, rows[-1])) + len(document) > logits.shape[1]:
                rows.append([])
            rows[-1].append(document)
        assert worst(logits, stock, rows) <= FLOAT32

    @pytest.mark.parametrize("model_type", MASKS)
    def test_a_mask_of_other_tokens(self, model_type):
        model = with_images(model_type)
        example = self.example(model, documents(model)[0])
        example[MASKS[model_type]] = example[MASKS[model_type]][:, 1:]
        with refused("unusable-data"):
            PackingCollator.for_model(model)([example])

    def test_padding_of_an_example_is_left_out_of_its_mask(self):
        stock, model = opened("mllama")
        document = documents(stock, [(3, IMAGE, 2)])[0]
        call = padded(stock, [document, images.document(stock, (9,))], "left")
        masks = {name: call[name][0].tolist() for name in ("input_ids", "attention_mask")}
        example = {
            **self.example(model, document),
            **masks,
            "cross_attention_mask": call["cross_attention_mask"][:1],
        }
        batch = PackingCollator.for_model(model)([example])
        assert torch.equal(batch["cross_attention_mask"], document.seen["cross_attention_mask"])

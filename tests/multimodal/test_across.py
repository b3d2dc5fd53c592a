"""Mllama and Idefics: text attends to images across, and each document, or row of a batch, reads its own alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopack
from autopack import PackingCollator
from autopack.tiny import images, media_rows
from autopack.tiny.images import IMAGE
from autopack.tiny.media_rows import Document
from compat.images import alone, compare, documents, packed, spans
from tests.conftest import FLOAT32, LEAK, error, gradients
from tests.multimodal.models import twins_with_images, with_images
from tests.multimodal.test_packed_rows import hold
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MASKS = {"mllama": "cross_attention_mask", "idefics": "image_attention_mask"}
PARTS = [(3, IMAGE, 2), (IMAGE, 9, IMAGE, 4), (7,)]


def opened(model_type: str, **others: Any) -> tuple[Any, Any]:
    """Twins whose gates, which begin near zero, let through what attention across gives."""
    twins = twins_with_images(model_type, **others)
    for model in twins:
        for name, parameter in model.named_parameters():
            if name.endswith(("gate", "alpha_cross_attn", "alpha_dense")) and "vision" not in name:
                torch.nn.init.ones_(parameter)
    return twins


def with_none(model: Any, found: list[Document]) -> list[Document]:
    """The documents, those without images with an empty one that no token sees, where upstream wants pixels."""
    if not images.needs_images(model):
        return found
    like = next(d for d in found if d.images)
    empty = {name: torch.zeros_like(value) for name, value in like.images[0].items()}
    of_tokens = {n: v[:, :1, :1] for n, v in like.seen.items()}
    return [
        d if d.images else Document(d.tokens, (empty,), {n: v.new_zeros(1, len(d), 1) for n, v in of_tokens.items()})
        for d in found
    ]


def padded(model: Any, found: list[Document], side: str) -> tuple[dict[str, Any], torch.Tensor]:
    """A batch of one document per row, and its mask."""
    columns = max(map(len, found))

    def pad(value: torch.Tensor) -> torch.Tensor:
        space = value.new_zeros(1, columns - value.shape[1], *value.shape[2:])
        return torch.cat([space, value] if side == "left" else [value, space], dim=1)

    rows = [
        [Document({n: pad(v) for n, v in d.tokens.items()}, d.images, {n: pad(v) for n, v in d.seen.items()})]
        for d in found
    ]
    return media_rows.rows(model, rows), torch.cat([pad(torch.ones(1, len(d), dtype=torch.long)) for d in found])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MASKS)
def test_documents_with_images_get_what_they_get_alone(model_type, implementation):
    stock, model = opened(model_type, attn_implementation=implementation)
    with autopack.enable(model):
        hold(compare(model, stock))


@pytest.mark.parametrize("model_type", MASKS)
def test_tokens_before_an_image_and_documents_without_one(model_type):
    """Where no token sees anything: upstream lets it see all images of the row, or nothing."""
    stock, model = opened(model_type)
    found = documents(stock, [(3, IMAGE, 2), (2, IMAGE, IMAGE, 3)])
    text = images.document(stock, (7,), seed=5)
    rows = [[found[0], text, found[1]], [found[1], text, found[0]]]
    with autopack.enable(model):
        logits = model(**packed(model, rows)).logits
    for document, row, a, b in spans(rows):
        expected = alone(stock, with_none(stock, [document, *found])[0]).logits[0]
        assert error(logits[row, a:b], expected) <= FLOAT32


@pytest.mark.parametrize("model_type", MASKS)
def test_stock_leaks_with_the_same_mask(model_type):
    stock, _ = opened(model_type)
    found = documents(stock)
    logits = stock(**packed(stock, [found]), use_cache=False).logits
    assert max(error(logits[row, a:b], alone(stock, d).logits[0]) for d, row, a, b in spans([found])) > LEAK


def test_a_mask_alone_keeps_no_images_apart(monkeypatch):
    """Negative control: documents kept apart, their images by the mask alone, and tokens that see none see all."""
    stock, model = opened("mllama")
    found = documents(stock, [(3, IMAGE, 2), (2, IMAGE, 3)])

    def by_mask(function: Any, module: Any, states: Any, mask: Any, options: Any, seen: Any) -> Any:
        return function(module, *states, mask, **options)

    monkeypatch.setattr(autopack.attention.cross, "attend_to_images", by_mask)
    with autopack.enable(model, verify=False):
        logits = model(**packed(model, [found])).logits
    assert error(logits[0, : len(found[0])], alone(stock, found[0]).logits[0]) > LEAK


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", MASKS)
def test_rows_of_a_padded_batch_get_what_they_get_alone(model_type, side):
    stock, model = opened(model_type)
    found = documents(stock, PARTS if model_type == "mllama" else PARTS[:2])
    found = with_none(stock, [*found, images.document(stock, (4,), seed=8)])
    call, mask = padded(stock, found, side)
    labels = torch.where((call["input_ids"] < 100) & (mask == 1), call["input_ids"], -100)
    if side == "left":
        labels[:, 1:][mask[:, :-1] == 0] = -100
    with autopack.enable(model) as handle:
        output = model(**call, attention_mask=mask, labels=labels, use_cache=False)
        output.loss.backward()
        assert handle.enabled.tally.left["its text attends to the images of the row"] == 1
    expected = [alone(stock, d).logits[0] for d in found]
    for row, own in enumerate(expected):
        assert error(output.logits[row, mask[row].bool()], own) <= FLOAT32
    targets = torch.cat([row[real.bool()][1:] for row, real in zip(labels, mask, strict=True)])
    loss = torch.nn.functional.cross_entropy(torch.cat([own[:-1] for own in expected]), targets)
    loss.backward()
    assert float(output.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-4)
    for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 + 1e-3 * theirs.abs().max()


def test_stock_lets_rows_of_a_batch_see_what_fills_them_up():
    """Negative control: a row without images beside one with two attends to empty ones, which it has not alone.

    So it does with `unpad=False`, which leaves padded batches to stock.
    """
    stock, model = opened("mllama")
    found = documents(stock, PARTS)
    call, mask = padded(stock, found, "right")
    logits = stock(**call, attention_mask=mask, use_cache=False).logits
    assert error(logits[2, : len(found[2])], alone(stock, found[2]).logits[0]) > LEAK
    with autopack.enable(model, unpad=False):
        assert torch.equal(model(**call, attention_mask=mask, use_cache=False).logits, logits)


class TestMasks:
    @pytest.fixture(params=MASKS)
    def call(self, request):
        stock, model = opened(request.param)
        with autopack.enable(model):
            found = documents(stock, [(3, IMAGE, 2), (2, IMAGE, 3)])
            yield model, packed(model, [found]), MASKS[request.param]

    def test_missing(self, call):
        model, arguments, name = call
        with refused("media-of-others", match=f"{name} says which document.*found none"):
            model(**{**arguments, name: None})

    def test_of_another_form(self, call):
        model, arguments, name = call
        with refused("media-of-others"):
            model(**{**arguments, name: arguments[name][:, 1:]})

    def test_that_shows_the_image_of_another_document(self, call):
        model, arguments, name = call
        mask = arguments[name].clone()
        mask[:, -1, 0] = 1
        with refused("media-of-others", match="shows it images that other documents see"):
            model(**{**arguments, name: mask})

    def test_in_another_order(self, call):
        model, arguments, name = call
        with refused("media-of-others", match="leaves out images before it, or is not in their order"):
            model(**{**arguments, name: arguments[name].flip(2)})

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
        with refused("media-of-others", match="an image that no token sees"):
            model(**call)
        call["aspect_ratio_ids"][:, 1] = 0  # as processors write those that fill up a row
        logits = model(**call).logits
    rest = Document(found[1].tokens, ())
    assert error(logits[0, len(found[0]) :], alone(stock, rest).logits[0]) <= FLOAT32


def test_states_that_came_without_images_are_refused():
    model = with_images("mllama")
    call = packed(model, [documents(model, [(7,), (5,)])])
    with (
        autopack.enable(model),
        refused("argument-of-no-document", match="cross_attention_states was given.*which states are whose"),
    ):
        model(**call, cross_attention_states=torch.zeros(2, 17, 64))


def test_checkpointing_reads_the_same_images():
    stock, model = opened("mllama")
    found = documents(stock)
    call = packed(model, [found])
    model.gradient_checkpointing_enable()
    with autopack.enable(model):
        model.train()(**call).logits.sum().backward()
    sum(alone(stock, d).logits.sum() for d in found).backward()
    for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 + 1e-3 * theirs.abs().max()


class TestCollator:
    """What a processor has made of each document becomes packed rows, their masks along the diagonal."""

    @staticmethod
    def example(model: Any, document: Document) -> dict[str, Any]:
        found = {name: value[0].tolist() for name, value in document.tokens.items()}
        return {**found, **media_rows.row(model, [document])}

    @pytest.mark.parametrize("max_length", [None, 24])
    @pytest.mark.parametrize("model_type", MASKS)
    def test_rows_get_what_documents_get_alone(self, model_type, max_length):
        stock, model = opened(model_type)
        found = with_none(
            stock, [*documents(stock, [(3, IMAGE, 2), (2, IMAGE, 3, IMAGE, 4)]), text := images.document(stock, (7,))]
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
        row = first = 0
        for document in found:
            if first + len(document) > logits.shape[1]:
                row, first = row + 1, 0
            got = logits[row, first : first + len(document)]
            assert error(got, alone(stock, document).logits[0]) <= FLOAT32
            first += len(document)

    @pytest.mark.parametrize("model_type", MASKS)
    def test_a_mask_of_other_tokens(self, model_type):
        model = with_images(model_type)
        example = self.example(model, documents(model)[0])
        example[MASKS[model_type]] = example[MASKS[model_type]][:, 1:]
        with refused("unusable-data", match=f"{MASKS[model_type]}.*wanted .1, tokens, images"):
            PackingCollator.for_model(model)([example])

    def test_padding_of_an_example_is_left_out_of_its_mask(self):
        stock, model = opened("mllama")
        document = documents(stock, [(3, IMAGE, 2)])[0]
        call, mask = padded(stock, [document, images.document(stock, (9,))], "left")
        example = {**self.example(model, document), "input_ids": call["input_ids"][0].tolist()}
        example |= {"attention_mask": mask[0].tolist(), "cross_attention_mask": call["cross_attention_mask"][:1]}
        batch = PackingCollator.for_model(model)([example])
        assert torch.equal(batch["cross_attention_mask"], document.seen["cross_attention_mask"])

    def test_documents_without_images_alone(self):
        """Idefics keeps an empty one, without which it does not run."""
        stock, model = opened("idefics")
        like = documents(stock, [(3, IMAGE)])[0]
        found = with_none(stock, [like, *(images.document(stock, (n,), seed=n) for n in (4, 6))])[1:]
        batch = PackingCollator.for_model(model)([self.example(model, d) for d in found])
        with autopack.enable(model):
            logits = model(**batch).logits[0]
        for document, got in zip(found, logits.split([4, 6]), strict=True):
            assert error(got, alone(stock, document).logits[0]) <= FLOAT32

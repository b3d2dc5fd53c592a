"""Calls with media, or of which no document can be run alone, are checked by gradients.

What one document gets of another, from sizes on that no tiny twin has, raises in the call that
meets it; `verify=False` shows that it leaks."""

import pytest
import torch

import autopack
from autopack import tiny
from autopack.tiny import images, media_rows, sounds
from autopack.tiny.images import IMAGE
from autopack.tiny.sounds import SOUND
from tests.conftest import FLOAT32, LEAK
from tests.multimodal.test_media_by_twin import apart, around, inner_of, mixed
from tests.multimodal.test_media_by_twin import documents as documents_of
from tests.support.refusals import refused

CODES = "no gradient reaches its images or other media"
"""Of types that make whole numbers of images, by which each finds its place among codes."""
BY_GRADIENTS = "got other logits, by what is another document's, than it gets alone"
BY_REPLACEMENT = "got other logits when other documents were replaced"


def of_ones_own(model_type, change, beyond):
    """A model whose inner model changes the features of several images, or its states, from a size
    on."""
    base = tiny.build(model_type, task="image-text-to-text", pad_token_id=0)

    def get_image_features(self, pixel_values, image_grid_thw=None, **given):
        given |= {} if image_grid_thw is None else {"image_grid_thw": image_grid_thw}
        found = super(inner, self).get_image_features(pixel_values, **given)
        return mixed(found) if change == "images" and len(pixel_values) > beyond else found

    def forward(self, *args, **given):
        output = super(inner, self).forward(*args, **given)
        states = output.last_hidden_state
        if change != "images" and states.shape[1] > beyond:
            others = {
                "tokens": states,
                "tokens, detached": states.detach(),
                "tokens, straight through a choice": states + (states.round() - states).detach(),
            }[change]
            output.last_hidden_state = states + others.mean(1, keepdim=True)
        return output

    frozen = torch.no_grad()(get_image_features)  # so that nothing but tokens tells of tokens
    images_alone = {"get_image_features": get_image_features}
    parts = (
        images_alone if change == "images" else {"forward": forward, "get_image_features": frozen}
    )
    inner = type("Inner", (inner_of(model_type),), parts)
    return around(base, inner)


@pytest.fixture
def larger(monkeypatch):
    """Pictures of 4 times as many patches in each direction, more than any of a twin."""

    def picture(model, number, generator):
        found = tiny_picture(model, number, generator)
        grid = found["image_grid_thw"] * torch.tensor([1, 4, 4])
        pixels = torch.randn(int(grid.prod()), found["pixel_values"].shape[1], generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grid}

    tiny_picture = images._picture

    def documents(model):
        with monkeypatch.context() as patched:
            patched.setattr(images, "_picture", picture)
            return documents_of(model)

    return documents


@pytest.mark.parametrize("computed", ["with gradients", "without"])
def test_images_that_meet_where_they_are_large(computed, larger):
    model = of_ones_own("qwen2_vl", "images", beyond=100)
    if computed == "without":  # as many training scripts freeze the encoder of images
        inner = type(model.model)
        inner.get_image_features = torch.no_grad()(inner.get_image_features)
    assert apart(model, documents_of(model)) <= FLOAT32
    assert apart(model, larger(model), verify=False) > LEAK
    with autopack.enable(model) as handle:
        model(**media_rows.packed(model, documents_of(model)))
        for _ in range(2):
            with refused("leak-detected", match=BY_GRADIENTS):
                model(**media_rows.packed(model, larger(model)))
        assert handle.checked.leaks == 2
        assert "2 leaking" in repr(handle)


def test_large_images_of_an_exact_class_pass(larger):
    model = of_ones_own("qwen2_vl", "images", beyond=10**9)
    with autopack.enable(model) as handle:
        model.train()
        call = media_rows.packed(model, larger(model))
        model(**call, labels=call["input_ids"])
        assert all(parameter.grad is None for parameter in model.parameters())
        assert handle.checked.checks == 1
        assert not handle.checked.skipped


@pytest.mark.parametrize(
    "change", ["tokens", "tokens, detached", "tokens, straight through a choice"]
)
def test_tokens_that_meet_where_every_document_has_an_image(change):
    model = of_ones_own("llava", change, beyond=400)
    short, long = (
        [images.document(model, (IMAGE, n), seed=n) for n in each]
        for each in ((3, 4), (150, 170, 160))
    )
    assert apart(model, short) <= FLOAT32
    assert apart(model, long, verify=False) > LEAK
    with autopack.enable(model) as handle:
        model(**media_rows.packed(model, short))
        assert not handle.checked.skipped
        with refused("leak-detected", match=BY_REPLACEMENT):
            model(**media_rows.packed(model, long))


def _writing_weights(inner):
    def forward(self, *args, **given):
        next(self.parameters()).data.mul_(1.0)
        return inner.forward(self, *args, **given)

    return forward


def _scaled_by_the_largest(inner):
    def forward(self, *args, **given):
        output = inner.forward(self, *args, **given)
        largest = output.last_hidden_state.abs().max().item()
        output.last_hidden_state = output.last_hidden_state / max(largest, 1e9) * 1e9
        return output

    return forward


@pytest.mark.parametrize(
    ("change", "told"),
    [(_writing_weights, {}), (_scaled_by_the_largest, {"where no gradient follows them": 1})],
)
def test_what_is_told_of_a_forward_of_ones_own(change, told):
    model = of_ones_own("qwen2_vl", "images", beyond=10**9)
    inner = type(model.model)
    inner.forward = change(inner.__base__)
    with autopack.enable(model) as handle:
        model(**media_rows.packed(model, documents_of(model)))
    assert {
        reason.rpartition(", ")[2]: count for reason, count in handle.checked.skipped.items()
    } == told


def test_images_that_become_codes_are_said_to_be_unchecked():
    model = tiny.build("emu3", task="image-text-to-text", pad_token_id=0).eval()
    with autopack.enable(model) as handle:
        model(**media_rows.packed(model, documents_of(model)[:2]))
        assert CODES in repr(handle)


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("voxtral", "seq2seq"), ("molmo2", ""), ("llava", ""), ("mllama", ""), ("kosmos-2", "")],
)
def test_no_alarm(model_type, task):
    model = tiny.build(model_type, task=task or "image-text-to-text", pad_token_id=0).eval()
    if task:
        found = [
            sounds.document(model, each, seed=n + 1)
            for n, each in enumerate([(3, SOUND), (SOUND, 4), (7,)])
        ]
    else:
        found = documents_of(model)[:2]  # all have images
    with autopack.enable(model, verify=False, check_every=1) as handle:
        model(**media_rows.packed(model, found))
        assert (handle.checked.checks, handle.checked.leaks) == (1, 0)
        assert not handle.checked.skipped

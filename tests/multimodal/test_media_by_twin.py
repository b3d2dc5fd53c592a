"""Code that no run has measured with media: its tiny twin is asked, with tiny images, videos and
sounds.

Of text alone such code may be exact and still let the images of a call meet.
"""

import pytest
import torch

import autopack
from autopack import tiny
from autopack.enabling import twin_calls
from autopack.tiny import images, media_rows, sounds
from autopack.tiny.images import IMAGE
from autopack.tiny.sounds import SOUND
from tests.conftest import FLOAT32, LEAK, error
from tests.support.refusals import refused


def features_of(output):
    return output.pooler_output if hasattr(output, "pooler_output") else output


def mixed(output):
    """Features of images or sounds with something of all others of the call."""
    found = features_of(output)
    parts = found if isinstance(found, (list, tuple)) else [found]
    mean = torch.stack([part.mean() for part in parts]).mean()
    made = (
        type(found)(part + mean for part in found)
        if isinstance(found, (list, tuple))
        else found + mean
    )
    if hasattr(output, "pooler_output"):
        output.pooler_output = made
        return output
    return made


def around(base, inner):
    """A model of a class of one's own like another, around an inner model of one's own."""

    def __init__(self, config):
        super(outer, self).__init__(config)
        self.model = inner(config)
        self.post_init()

    outer = type("Outer", (type(base),), {"__init__": __init__})
    torch.manual_seed(0)
    return outer(base.config).eval()


def written(model_type, inner, name, mixes, task="image-text-to-text", beyond=0):
    """A model of one's own class, whose inner model is one of one's own too."""
    base = tiny.build(model_type, task=task, pad_token_id=0)

    def ask(self, *args, **given):
        found = getattr(super(own, self), name)(*args, **given)
        return mixed(found) if mixes and len(features_of(found)) > beyond else found

    own = type("Inner", (inner,), {name: ask})
    return around(base, own)


def documents(model):
    parts = [(4, IMAGE, 5), (IMAGE, 3), (6,)]
    return [images.document(model, each, seed=number + 1) for number, each in enumerate(parts)]


def apart(model, found, **options):
    """How far packed rows are from documents alone, with a model that is enabled for it."""
    alone = torch.cat([media_rows.alone(model, each).logits[0] for each in found]).detach()
    with autopack.enable(model, **options):
        return error(model(**media_rows.packed(model, found)).logits[0].detach(), alone)


def not_proven(model, found, match):
    with autopack.enable(model):
        for _ in range(2):
            with refused("media-not-proven", match=match):
                model(**media_rows.packed(model, found))


def leaks_and_is_not_proven(model, found, kind="image"):
    assert apart(model, found, verify=False) > LEAK
    not_proven(model, found, f"documents with {kind}s are not proven to be kept apart")


def inner_of(model_type, task="image-text-to-text"):
    return type(tiny.build(model_type, task=task).model)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_a_class_of_ones_own_that_keeps_images_apart_is_served(model_type):
    model = written(model_type, inner_of(model_type), "get_image_features", mixes=False)
    assert apart(model, documents(model)) <= FLOAT32


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_one_that_lets_them_meet_is_refused_with_images_and_serves_text(model_type):
    model = written(model_type, inner_of(model_type), "get_image_features", mixes=True)
    found = documents(model)
    leaks_and_is_not_proven(model, found)
    text = [images.document(model, (5,), seed=4), images.document(model, (8,), seed=5)]
    assert apart(model, text) <= FLOAT32


@pytest.mark.parametrize("beyond", [3, 5, 12])
def test_what_begins_with_a_later_image_is_found_by_a_twin_with_as_many(beyond):
    """Every document has an image, so no check of the call could run one that has none."""
    model = written("llava", inner_of("llava"), "get_image_features", mixes=True, beyond=beyond)
    few, many = (
        [images.document(model, (IMAGE, 3 + n % 3), seed=n) for n in range(count)]
        for count in (2, 13)
    )
    if beyond == 12:
        assert apart(model, few) <= FLOAT32
    leaks_and_is_not_proven(model, many)


def test_of_more_than_a_twin_is_asked_of_is_refused(monkeypatch):
    monkeypatch.setattr(twin_calls, "_MOST", 8)
    model = written("llava", inner_of("llava"), "get_image_features", mixes=False)
    found = [images.document(model, (IMAGE, 3), seed=n) for n in range(9)]
    assert apart(model, found[:8]) <= FLOAT32
    not_proven(model, found, "more than 8 images or documents")


def test_masks_of_images_that_a_class_of_ones_own_makes_are_not_lost_in_silence():
    """Gemma 3 makes the masks of its blocks outside of the text model; in a class of one's own they
    do not arrive."""
    model = written("gemma3", inner_of("gemma3"), "get_image_features", mixes=False)
    found = documents(model)
    leaks_and_is_not_proven(model, found)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_the_projector(when):
    model = tiny.build("llava", task="image-text-to-text", pad_token_id=0).eval()
    found = documents(model)

    def hook(module, given, output):
        return output + output.mean()

    if when == "before":
        model.model.multi_modal_projector.register_forward_hook(hook)
    with autopack.enable(model):
        if when == "after":
            model.model.multi_modal_projector.register_forward_hook(hook)
        with refused("leak-detected"):
            model(**media_rows.packed(model, found))


def test_where_no_twin_tells():
    model = tiny.build("llava", task="image-text-to-text").eval()
    inner = type(model.model)
    put = {
        "get_image_features": lambda self, *args, **given: inner.get_image_features(
            self, *args, **given
        )
    }
    model.model.__class__ = type("Patched", (inner,), put)
    found = documents(model)
    not_proven(model, found, "no twin of it tells")
    assert apart(model, found, verify=False) <= FLOAT32


@pytest.mark.parametrize("mixes", [False, True])
def test_sounds(mixes):
    model = written(
        "voxtral", inner_of("voxtral", "seq2seq"), "get_audio_features", mixes, "seq2seq"
    )
    parts = ((3, SOUND), (SOUND, 4), (7,))
    found = [sounds.document(model, each, seed=number + 1) for number, each in enumerate(parts)]
    if not mixes:
        assert apart(model, found) <= FLOAT32
        return
    leaks_and_is_not_proven(model, found, "sound")

"""Documents with sounds, images and videos in one row: positions are of all media, and each kind
keeps its order."""

import pytest
import torch

import autopack
from autopack.tiny import images, media_rows, sounds
from autopack.tiny.images import IMAGE
from autopack.tiny.media_rows import Document
from autopack.tiny.sounds import SOUND
from compat.images import as_videos, labels_of
from tests.conftest import FLOAT32, LEAK, error
from tests.engine import counted, mean_loss
from tests.multimodal.models import same_gradients, same_loss
from tests.multimodal.test_sounds import twins_with_sounds
from tests.support.refusals import refused

KINDS = (("image", "sound"), ("sound", "video", "image"), (), ("video", "sound", "sound"))
"""The media of four documents, in order, with text between them."""


def piece(model, kind, seed):
    """Text and one of a kind of media; sounds of one length, which Qwen3-Omni wants."""
    if kind == "sound":
        return sounds.document(model, [2, SOUND, 1], seed=seed, frames=sounds.FRAMES)
    found = images.document(model, [2, IMAGE, 1], seed=seed)
    return as_videos(model, found) if kind == "video" else found


def joined(model, pieces):
    """The arguments of a row of pieces; the media of each kind come in order."""
    names = [name for name in pieces[0].tokens if all(name in p.tokens for p in pieces)]
    call = {name: torch.cat([p.tokens[name] for p in pieces], dim=1) for name in names}
    for kind in ("pixel_values", "pixel_values_videos", "input_features"):
        of_kind = [Document({}, p.images) for p in pieces if p.images and kind in p.images[0]]
        call |= media_rows.row(model, of_kind) if of_kind else {}
    return call


def alone(model, pieces, labels=None):
    call = joined(model, pieces)
    return model(
        **call, attention_mask=torch.ones_like(call["input_ids"]), use_cache=False, labels=labels
    )


def documents(model):
    found = []
    for number, kinds in enumerate(KINDS):
        of_media = [piece(model, kind, 10 * number + place + 1) for place, kind in enumerate(kinds)]
        found.append(of_media or [images.document(model, [7], seed=10 * number)])
    return found


def packed(model, found):
    positions = counted([sum(map(len, pieces)) for pieces in found])
    return {**joined(model, [p for pieces in found for p in pieces]), "position_ids": positions}


TYPES = ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "gemma4", "dots3_note", "muse_spark"]


@pytest.mark.parametrize("model_type", TYPES)
def test_documents_with_all_kinds_of_media(model_type):
    stock, model = twins_with_sounds(model_type)
    found = documents(stock)
    own = [torch.cat([labels_of(p) for p in pieces], dim=1) for pieces in found]
    with autopack.enable(model, verify=False):
        out = model(**packed(model, found), labels=torch.cat(own, dim=1))
        out.loss.backward()
    expected = [alone(stock, *each) for each in zip(found, own, strict=True)]
    for part, each in zip(
        out.logits[0].split([each.shape[1] for each in own]), expected, strict=True
    ):
        assert error(part, each.logits[0]) <= FLOAT32
    loss = mean_loss(
        [each.loss for each in expected], [int((each[:, 1:] != -100).sum()) for each in own]
    )
    loss.backward()
    same_loss(out.loss, loss)
    same_gradients(model, stock, least=1e-5)


@pytest.mark.parametrize("model_type", TYPES[:2])
def test_what_qwen_omni_numbers_by(model_type):
    """Seconds between frames, and lengths of sounds beside images: without them documents have
    other positions."""
    stock, model = twins_with_sounds(model_type)
    found = documents(stock)
    call = packed(model, found)
    with autopack.enable(model, verify=False):
        right = model(**call).logits
        slower = model(
            **{**call, "video_second_per_grid": 3 * call["video_second_per_grid"]}
        ).logits
        with refused("media-positions"):
            model(**{**call, "video_second_per_grid": None})
    assert error(slower, right) > LEAK
    rows = stock(**call, use_cache=False).logits
    assert error(rows[0, : sum(map(len, found[0]))], alone(stock, found[0]).logits[0]) > LEAK

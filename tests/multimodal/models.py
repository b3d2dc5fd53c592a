"""Tiny models that take images, batches of documents with media, and what packed rows of them must
agree with."""

import pytest
import torch

import autopack
from autopack import tiny
from autopack.tiny.images import IMAGE
from autopack.tiny.media_rows import Document
from compat.images import alone, alone_loss, compare, packed, rows_of, spans
from tests.conftest import FLOAT32, LEAK, error, gradients
from tests.engine import IGNORED, in_rows

PARTS = [(3, IMAGE, 2), (IMAGE, 9, IMAGE, 4), (7,)]
"""Documents of a padded batch with one image, with two and with none."""
GRADIENT = 1e-3
"""Largest error of an entry of a gradient in float32, of itself: sums over all tokens and media
cancel in it."""


def with_images(model_type, attn_implementation="sdpa", **others):
    return tiny.build(
        model_type, task="image-text-to-text", attn_implementation=attn_implementation, **others
    )


def twins_with_images(model_type, **others):
    """A stock model and one to enable, with the same parameters."""
    return with_images(model_type, **others), with_images(model_type, **others)


def opened(model_type, **others):
    """Twins whose gates, which begin near zero, let through what attention across gives."""
    twins = twins_with_images(model_type, **others)
    for model in twins:
        for name, parameter in model.named_parameters():
            if name.endswith(("gate", "alpha_cross_attn", "alpha_dense")) and "vision" not in name:
                torch.nn.init.ones_(parameter)
    return twins


def hold(measured):
    """Want what `compat.images.compare` measures to be within the auditor's tolerances."""
    bounds = {"worst": FLOAT32, "influence": FLOAT32, "loss": 1e-3, "gradient": 1e-3}
    assert all(value <= bounds[name] for name, value in measured.items()), measured


def worst(logits, stock, rows):
    """The largest error of the documents of these rows, against what each gets alone."""
    return max(error(logits[row, a:b], alone(stock, d).logits[0]) for d, row, a, b in spans(rows))


def serves(model, stock, rows, **options):
    """Want what documents get alone of packed rows of a model that is enabled for it."""
    with autopack.enable(model, **options):
        assert worst(model(**packed(model, rows)).logits, stock, rows) <= FLOAT32


def agrees(model, stock, verify=True, **options):
    """Want all that `compare` measures of a model that is enabled for it."""
    with autopack.enable(model, verify=verify):
        hold(compare(model, stock, **options))


def leaks(stock, rows, **options):
    """The negative control: whether stock lets the documents of packed rows meet."""
    return worst(stock(**packed(stock, rows), **options).logits, stock, rows) > LEAK


def same_gradients(model, stock, least=1e-4):
    """Want the same gradients; `least` is what rounding may leave of an entry that is zero
    otherwise."""
    for mine, theirs in zip(gradients(model), gradients(stock), strict=True):
        assert (mine - theirs).abs().max() <= least + GRADIENT * theirs.abs().max()


def same_loss(found, expected, within=1e-4):
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=within)


def as_alone(output, model, stock, rows):
    """Want the mean loss of documents alone, and its gradients."""
    output.loss.backward()
    expected = alone_loss(stock, rows)
    expected.backward()
    same_loss(output.loss, expected)
    same_gradients(model, stock)


def unpadded_as_stock(model, stock, call, **options):
    """Want what stock gives of a padded batch that runs without its padding; return the output."""
    with autopack.enable(model, **options) as handle:
        found = model(**call, use_cache=False)
        assert (handle.tally.batches, {*handle.tally.left}) == (1, set())
    expected = stock(**call, use_cache=False)
    real = call.get("decoder_attention_mask", call.get("attention_mask")).bool()
    assert error(found.logits[real], expected.logits[real]) <= FLOAT32
    if expected.get("image_hidden_states") is not None:
        assert error(found.image_hidden_states, expected.image_hidden_states) <= FLOAT32
    same_loss(found.loss, expected.loss)
    found.loss.backward()
    expected.loss.backward()
    same_gradients(model, stock)
    return found


def padded(model, found, side="right"):
    """A batch of one document per row with its mask.

    Placeholders and what would be predicted at padding have no label.
    """
    columns = max(map(len, found))

    def pad(values):
        spaces = {n: v.new_zeros(1, columns - v.shape[1], *v.shape[2:]) for n, v in values.items()}
        first = (spaces, values) if side == "left" else (values, spaces)
        return {name: torch.cat([part[name] for part in first], dim=1) for name in values}

    call = rows_of(model, [[Document(pad(d.tokens), d.images, pad(d.seen))] for d in found])
    half = "decoder_" if "decoder_input_ids" in call else ""
    mask = in_rows([torch.ones_like(d.predicted[0]) for d in found], side)
    ids = call[f"{half}input_ids"]
    labels = torch.where((ids < 100) & (mask == 1), ids, IGNORED)
    # stock would compare the first token of a document with a prediction made at padding
    if side == "left":
        labels[:, 1:][mask[:, :-1] == 0] = IGNORED
    return {**call, f"{half}attention_mask": mask, "labels": labels}


def rows_as_alone(model, stock, found, side):
    """Want of each row of a padded batch what its document gets alone, and not what stock gives;
    return the tally."""
    call = padded(stock, found, side)
    with autopack.enable(model) as handle:
        output = model(**call, use_cache=False)
        tally = handle.enabled.tally
    for row, document in enumerate(found):
        real = call["attention_mask"][row].bool()
        assert error(output.logits[row, real], alone(stock, document).logits[0]) <= FLOAT32
    as_alone(output, model, stock, [[document] for document in found])
    return tally

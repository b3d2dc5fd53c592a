"""Losses of the user's: functions set on a model, labels of other shapes, criteria outside of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.unfamiliar.common import (
    DECODERS,
    IGNORED,
    Way,
    build,
    crossed,
    errors,
    exact_or_refused,
    ids,
    must_be_exact,
    spans,
    subclass,
)
from tests.unfamiliar.test_subclasses import passes_all_on

pytestmark = pytest.mark.sampled(2)

WAY = Way()


def _each(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    """The loss of every token, zero at ignored ones; (rows, columns)."""
    return nn.functional.cross_entropy(logits.double().transpose(1, 2), targets, reduction="none", **options)


def per_sequence(logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
    """Every row counts alike, however many of its tokens are labelled."""
    targets = labels[:, 1:]
    counted = (targets != IGNORED).sum(1).clamp(min=1)
    return (_each(logits[:, :-1], targets).sum(1) / counted).mean()


def summed(logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
    return _each(logits[:, :-1], labels[:, 1:]).sum()


def smoothed(logits: Any, labels: Any, vocab_size: Any = None, epsilon: float = 0.1, **kwargs: Any) -> Any:
    targets = labels[:, 1:]
    return _each(logits[:, :-1], targets, label_smoothing=epsilon).sum() / (targets != IGNORED).sum()


def unshifted(logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
    """For labels that the user's collator has shifted."""
    return _each(logits, labels).sum() / (labels != IGNORED).sum()


def two_ahead(logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
    """Every token predicts the one after the next: two labels at a boundary are another document's."""
    return _each(logits[:, :-2], labels[:, 2:]).sum()


def with_a_penalty(logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
    """A regulariser over all columns of the batch, padding too."""
    return smoothed(logits, labels, epsilon=0.0) + 0.1 * logits.logsumexp(-1).square().mean()


def between_rows(logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
    """A preference loss, which compares the rows of a batch."""
    score = -_each(logits[:, :-1], labels[:, 1:]).sum(1)
    return -nn.functional.logsigmoid(0.1 * (score[0] - score[1:])).mean()


def of_the_last_token(logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
    """Only the last labelled token of every row counts."""
    each = _each(logits[:, :-1], labels[:, 1:])
    last = ((labels[:, 1:] != IGNORED) * torch.arange(1, labels.shape[1])).argmax(1)
    return each.gather(1, last[:, None]).mean()


class Criterion:
    """A loss that has no `__name__`."""

    def __call__(self, logits: Any, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Any:
        return smoothed(logits, labels, epsilon=0.2)


LOSSES = {
    "per sequence": (per_sequence, ("documents", "mean")),
    "summed": (summed, ("sum",)),
    "smoothed": (smoothed, ("mean",)),
    "partial": (partial(smoothed, epsilon=0.3), ("mean",)),
    "object": (Criterion(), ("mean",)),
    "lambda": (lambda logits, labels, vocab_size=None, **kwargs: summed(logits, labels) / 7, ("sum",)),
    "unshifted": (unshifted, ("mean",)),
    "two ahead": (two_ahead, ("sum",)),
    "with a penalty": (with_a_penalty, ()),
    "between rows": (between_rows, ()),
    "of the last token": (of_the_last_token, ("documents",)),
}
"""Each with the ways in which losses of documents alone may be put together for a packed row."""
OF_DOCUMENTS = [name for name, (_, reductions) in LOSSES.items() if reductions]
WHEN = ("before", "after")


def sets(loss: Any) -> Any:
    return lambda model: setattr(model, "loss_function", loss)


def test_every_type_uses_the_loss_that_is_set():
    """The control: each of these losses is another one than the model's own."""
    for model_type in DECODERS:
        model = build(model_type)
        own = WAY.padded(model)
        for name, (loss, _) in LOSSES.items():
            model.loss_function = loss
            assert errors(WAY.padded(model), own)["gradients"] > 1e-3, (model_type, name)


@pytest.mark.parametrize(("name", "model_type"), crossed(list(LOSSES), DECODERS, 2))
@pytest.mark.parametrize("when", WHEN)
def test_a_loss_of_ones_own_is_exact_on_padded_batches(name, model_type, when):
    must_be_exact(model_type, WAY.batch, sets(LOSSES[name][0]), when)


@pytest.mark.parametrize(("name", "when"), crossed(list(LOSSES), WHEN, 1))
def test_padding_on_the_left(name, when):
    def left(model: Any) -> Any:
        return WAY.padded(model, "left")

    must_be_exact("llama", ((left, left),), sets(LOSSES[name][0]), when)


@pytest.mark.parametrize(("name", "model_type"), crossed(list(OF_DOCUMENTS), DECODERS[::-1], 1))
@pytest.mark.parametrize("when", WHEN)
def test_a_loss_of_ones_own_on_packed_rows(name, model_type, when):
    """The losses of documents alone tell what the loss of a row is, or the row is refused."""
    loss, reductions = LOSSES[name]
    found = []
    for reduction in reductions:
        way = Way(reduction=reduction, shifts=loss is not unshifted)
        try:
            exact_or_refused(model_type, way.row, sets(loss), when)
            return
        except AssertionError as error:
            found.append(error)
    raise found[0]


@pytest.mark.parametrize(("name", "model_type"), crossed(list(LOSSES), DECODERS[3:], 1))
def test_a_loss_by_a_property_of_a_subclass_is_exact_on_padded_batches(name, model_type):
    def change(model: Any) -> None:
        subclass(model, passes_all_on, loss_function=property(lambda self: LOSSES[name][0]))

    must_be_exact(model_type, WAY.batch, change)


def computes_its_loss(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    output = super(type(self), self).forward(input_ids=input_ids, **kwargs)
    if labels is not None:
        output.loss = smoothed(output.logits, labels)
    return output


def has_labels_of_its_own(self: Any, input_ids: Any = None, answers: Any = None, **kwargs: Any) -> Any:
    return computes_its_loss(self, input_ids, answers, **kwargs)


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_subclass_that_computes_its_loss(model_type):
    exact_or_refused(model_type, WAY.both, lambda model: subclass(model, computes_its_loss))


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_subclass_with_labels_of_its_own(model_type):
    way = Way(labels="answers")
    exact_or_refused(model_type, way.both, lambda model: subclass(model, has_labels_of_its_own))


class Outside(Way):
    """A criterion of the user's, outside of the model; its labels leave out what begins a document."""

    def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
        labels = arguments.pop("labels").clone()
        if labels.shape == ids().shape:
            labels[:, [a for a, _ in spans()]] = IGNORED
        output = super()._call(model, arguments)
        output.loss = smoothed(output.logits, labels)
        return output


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_criterion_outside_of_the_model_is_exact(model_type):
    must_be_exact(model_type, Outside(given={"use_cache": False}).both)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mamba"])
def test_a_criterion_outside_of_a_subclass_is_exact(model_type):
    must_be_exact(model_type, Outside().both, lambda model: subclass(model, passes_all_on))


class Shaped(Way):
    """Labels of other shapes: stock flattens them."""

    shape: Any = None

    def _labels(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"labels": type(self).shape(tokens)}


SHAPES = {
    "(T,)": lambda tokens: tokens[0],
    "(1, 1, T)": lambda tokens: tokens[None],
    "with ignored tokens": lambda tokens: tokens.where(tokens % 3 != 0, IGNORED),
    "int32": lambda tokens: tokens.int().long(),
}


@pytest.mark.parametrize(("name", "model_type"), crossed(list(SHAPES), ["llama", "gpt2", "bloom", "mamba", "opt"], 3))
def test_labels_of_any_shape_that_stock_takes(name, model_type):
    way = type("Shape", (Shaped,), {"shape": SHAPES[name]})()
    must_be_exact(model_type, way.row)


@pytest.mark.parametrize(("name", "model_type"), crossed(list(SHAPES), ["gpt_neox", "falcon", "llama", "qwen2_moe"], 1))
def test_labels_of_any_shape_given_to_a_subclass(name, model_type):
    way = type("Shape", (Shaped,), {"shape": SHAPES[name]})()
    exact_or_refused(model_type, way.row, lambda model: subclass(model, passes_all_on))


class ShiftedLabels(Way):
    """Labels that the user has shifted within documents, beside the labels that make transformers compute a loss."""

    def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
        labels = arguments["labels"]
        begins = [a for a, _ in spans()] if labels.shape == ids().shape else [0]
        inside = labels.index_fill(1, torch.tensor(begins), IGNORED)
        arguments = {**arguments, "shift_labels": nn.functional.pad(inside, (0, 1), value=IGNORED)[:, 1:].contiguous()}
        return super()._call(model, arguments)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "gpt_neox", "olmo2", "phi", "starcoder2"])
@pytest.mark.parametrize("thin", [False, True])
def test_labels_that_are_shifted_already(model_type, thin):
    change = (lambda model: subclass(model, passes_all_on)) if thin else None
    must_be_exact(model_type, ShiftedLabels().both, change)


@pytest.mark.parametrize("items", [13, torch.tensor(13)], ids=["int", "tensor"])
@pytest.mark.parametrize(("model_type", "thin"), crossed(["llama", "gpt2", "bloom", "mamba", "opt"], [False, True], 2))
def test_a_count_of_items_in_the_batch(model_type, thin, items):
    """As Trainer gives it with gradient accumulation: the loss is a sum over that count."""
    way = Way(given={"num_items_in_batch": items}, reduction="sum")
    change = (lambda model: subclass(model, passes_all_on)) if thin else None
    must_be_exact(model_type, way.both, change)

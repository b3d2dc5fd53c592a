"""Losses of the user's: functions set on a model, labels of other shapes."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from tests.conftest import spans
from tests.engine import IGNORED, LENGTHS, WHEN, Call, errors, verdict
from tests.subjects import DECODERS, build, crossed, subclass, turned
from tests.unfamiliar.properties import Property, table

CALL = Call()


def _each(logits, targets, **options):
    """The loss of every token, zero at ignored ones; (rows, columns)."""
    return nn.functional.cross_entropy(
        logits.double().transpose(1, 2), targets, reduction="none", **options
    )


def per_sequence(logits, labels, vocab_size=None, **kwargs):
    """Every row counts alike, however many of its tokens are labelled."""
    targets = labels[:, 1:]
    counted = (targets != IGNORED).sum(1).clamp(min=1)
    return (_each(logits[:, :-1], targets).sum(1) / counted).mean()


def summed(logits, labels, vocab_size=None, **kwargs):
    return _each(logits[:, :-1], labels[:, 1:]).sum()


def smoothed(logits, labels, vocab_size=None, epsilon=0.1, **kwargs):
    targets = labels[:, 1:]
    return (
        _each(logits[:, :-1], targets, label_smoothing=epsilon).sum() / (targets != IGNORED).sum()
    )


def unshifted(logits, labels, vocab_size=None, **kwargs):
    """For labels that the user's collator has shifted."""
    return _each(logits, labels).sum() / (labels != IGNORED).sum()


def two_ahead(logits, labels, vocab_size=None, **kwargs):
    """Every token predicts the one after the next: two labels at a boundary are another
    document's."""
    return _each(logits[:, :-2], labels[:, 2:]).sum()


def with_a_penalty(logits, labels, vocab_size=None, **kwargs):
    """A regulariser over all columns of the batch, padding too."""
    return smoothed(logits, labels, epsilon=0.0) + 0.1 * logits.logsumexp(-1).square().mean()


def between_rows(logits, labels, vocab_size=None, **kwargs):
    """A preference loss, which compares the rows of a batch."""
    score = -_each(logits[:, :-1], labels[:, 1:]).sum(1)
    return -nn.functional.logsigmoid(0.1 * (score[0] - score[1:])).mean()


LOSSES = {
    "per sequence": (per_sequence, ("documents", "mean")),
    "summed": (summed, ("sum",)),
    "smoothed": (smoothed, ("mean",)),
    # which has no `__name__`
    "partial": (partial(smoothed, epsilon=0.3), ("mean",)),
    "unshifted": (unshifted, ("mean",)),
    "two ahead": (two_ahead, ("sum",)),
    "with a penalty": (with_a_penalty, ()),
    "between rows": (between_rows, ()),
}
"""Each with the ways in which losses of documents alone may be put together for a packed row."""
OF_DOCUMENTS = [name for name, (_, reductions) in LOSSES.items() if reductions]


def test_every_type_uses_the_loss_that_is_set():
    """The control: each of these losses is another one than the model's own."""
    for model_type in DECODERS:
        model = build(model_type)
        own = CALL.padded(model)
        for name, (loss, _) in LOSSES.items():
            model.loss_function = loss
            assert errors(CALL.padded(model), own)["gradients"] > 1e-3, (model_type, name)


@pytest.mark.parametrize(("name", "model_type"), crossed(list(OF_DOCUMENTS), DECODERS[::-1], 1))
@pytest.mark.parametrize("when", WHEN)
def test_a_loss_of_ones_own_on_packed_rows(name, model_type, when):
    """The losses of documents alone tell what the loss of a row is, or the row is refused."""
    loss, reductions = LOSSES[name]
    found = []
    for reduction in reductions:
        call = Call(reduction=reduction, shifts=loss is not unshifted)
        try:
            verdict(model_type, call.row, lambda model: sets(model, name), when)
            return
        except AssertionError as error:
            found.append(error)
    raise found[0]


def sets(model, name):
    model.loss_function = LOSSES[name][0]


def computes_its_loss(self, input_ids=None, labels=None, **kwargs):
    output = super(type(self), self).forward(input_ids=input_ids, **kwargs)
    if labels is not None:
        output.loss = smoothed(output.logits, labels)
    return output


def has_labels_of_its_own(self, input_ids=None, answers=None, **kwargs):
    return computes_its_loss(self, input_ids, answers, **kwargs)


@dataclass(frozen=True)
class Shaped(Call):
    """Labels of other shapes: stock flattens them."""

    shape: str = ""

    def labelled(self, tokens):
        return {"labels": SHAPES[self.shape](tokens)}


SHAPES = {
    "(T,)": lambda tokens: tokens[0],
    "(1, 1, T)": lambda tokens: tokens[None],
    "with ignored tokens": lambda tokens: tokens.where(tokens % 3 != 0, IGNORED),
}


class ShiftedLabels(Call):
    """Labels that the user has shifted within documents, beside the labels that make transformers
    compute a loss."""

    def run(self, model, arguments):
        labels = arguments["labels"]
        begins = [a for a, _ in spans(LENGTHS)] if self.is_row(labels) else [0]
        inside = labels.index_fill(1, torch.tensor(begins), IGNORED)
        arguments = {
            **arguments,
            "shift_labels": nn.functional.pad(inside, (0, 1), value=IGNORED)[:, 1:].contiguous(),
        }
        return super().run(model, arguments)


PADDED = [(t, name, when) for name, t in crossed(list(LOSSES), DECODERS) for when in WHEN]
SHIFTED = ["llama", "qwen2_moe", "gpt_neox", "olmo2", "phi", "starcoder2"]


@table([
    Property("a loss of one's own, padded", PADDED, sets, CALL.batch, WHEN),
    Property("a subclass with labels of its own", DECODERS, lambda model: subclass(model, has_labels_of_its_own),
             Call(labels="answers").both, usual=2),
    Property("labels of any shape", turned(crossed(list(SHAPES), ["llama", "gpt2", "bloom", "mamba", "opt"], 3)),
             None, lambda _, name: Shaped(shape=name).row, WHEN, usual=2),
    Property("labels that are shifted already", SHIFTED, None, ShiftedLabels().both, WHEN, usual=2),
])  # fmt: skip
def test_a_loss(subject, case):
    subject.hold(*case)

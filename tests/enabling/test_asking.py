"""Whether a loss shifts, asked of the model: whatever its class is called and however its forward
is written."""

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny
from autopack.auditing.asking import first_label_counts
from autopack.runtime.scope import stock
from tests.conftest import attributes, same
from tests.encoder_decoder.test_recordings import with_recordings
from tests.engine import next_token_loss
from tests.proving.untouched import Mine


def as_class(kind, model_type="llama", task="causal-lm", **config):
    """A tiny model, made one of this class."""
    model = tiny.build(model_type, task=task, **config)
    model.__class__ = kind
    return model


class InColumn(LlamaForCausalLM):
    """A criterion of its own, which compares one column."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        if labels is not None:
            output.loss = cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output


class Smoothed(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        logits = super().forward(input_ids, **kwargs).logits
        loss = next_token_loss(logits, labels, label_smoothing=0.1)
        return (loss, logits) if labels is not None else (logits,)

    # Without labels it crashes, and it returns a tuple.


class NoLabels(LlamaForCausalLM):
    def forward(self, input_ids, **kwargs):
        kwargs.pop("labels", None)
        return super().forward(input_ids, **kwargs)


class Constant(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.loss = output.logits.sum() * 0 if labels is not None else None
        return output


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (LlamaForCausalLM, False),
        (Mine, False),
        (InColumn, True),
        (Smoothed, False),
        (NoLabels, None),
        (Constant, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_write_a_loss_is_asked(kind, expected, dtype):
    assert first_label_counts(as_class(kind, dtype=dtype)) is expected


@pytest.mark.parametrize("classes", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [None, "regression", "multi_label_classification"])
def test_one_label_per_row_is_not_taken_for_one_per_token(classes, kind):
    model = tiny.build(
        "llama", task="sequence-classification", num_labels=classes, problem_type=kind
    )
    model.config.pad_token_id = 0
    assert first_label_counts(model) is None
    assert model.config.problem_type == kind


class HidingItsHalves(transformers.T5ForConditionalGeneration):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def with_own_loss():
    model = tiny.build("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: cross_entropy(
        logits.float().reshape(-1, vocab_size), labels.reshape(-1)
    )
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: with_recordings()[0], True),  # without recordings
        (lambda: as_class(HidingItsHalves, "t5", "seq2seq"), True),
        (with_own_loss, True),
        (lambda: tiny.build("whisper"), True),
        (lambda: tiny.build("qwen2_vl", task="image-text-to-text"), False),
        (lambda: tiny.build("bert", task="token-classification", num_labels=2), True),
        # whose loss is zero
        (lambda: tiny.build("bert", task="token-classification", num_labels=1), None),
    ],
)
def test_others_are_asked(make, expected):
    assert first_label_counts(make()) is expected


@pytest.mark.parametrize("kind", [LlamaForCausalLM, InColumn])
def test_logits_that_are_all_alike(kind):
    """A head of zeros gives every label the same loss; what it differs in is its gradient."""
    model = as_class(kind)
    torch.nn.init.zeros_(model.lm_head.weight)
    assert first_label_counts(model) is (kind is InColumn)


def test_an_enabled_model_is_asked_as_stock_has_it():
    model = as_class(Mine)
    with autopack.enable(model, verify=False) as handle, stock(handle.enabled):
        assert first_label_counts(model) is False


def test_what_transformers_notes_on_a_model_is_taken_off_again():
    """Hidden states are captured by hooks that stay once they were asked for."""
    model = tiny.build("llama")
    before = attributes(model)
    autopack.audit(model, modes=("every output",), training=(False,))
    assert same(attributes(model), before)
    assert (
        len(
            model(
                input_ids=tiny.tokens(model.config, 1, 5), output_hidden_states=True
            ).hidden_states
        )
        > 1
    )

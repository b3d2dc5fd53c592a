"""What is counted of the calls of an enabled model: real tokens, columns that ran, documents,
padding left out."""

import logging
import re

import pytest
import torch
from torch import nn

import autopack
from autopack import tiny
from autopack.runtime.tally import Volume
from tests.conftest import token_ids
from tests.support.padded import batch, mask_of

LENGTHS = (7, 3, 9)
REAL, PADDING = sum(LENGTHS), 3 * 9 - sum(LENGTHS)
STAYED = Volume(calls=1, rows=3, columns=27, tokens=REAL, documents=3)
RAN = Volume(calls=1, rows=1, columns=REAL, tokens=REAL, documents=3, skipped=PADDING)


def padded():
    return batch("causal LM", mask_of(LENGTHS))


@pytest.fixture
def model():
    return tiny.build("llama").train()


CLASSES = {"task": "sequence-classification", "pad_token_id": 0}
PAIRS = {"task": "seq2seq"}
ROW = {
    "input_ids": token_ids(1, 8),
    "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]]),
}
"""Two documents and, behind them, padding."""
ONES_AMONG = torch.tensor([[0, 0, 0, 1, 2, 0, 0, 0], [0, 1, 0, 0, 0, 1, 2, 3]])
"""Positions of documents of one token among others; those behind all others are padding."""
CALLS = [
    ("llama", padded(), RAN),
    ("llama", {"input_ids": token_ids(2, 5)}, Volume(1, 2, 10, 10, 2)),
    (
        "llama",
        {"input_ids": token_ids(2, 8), "position_ids": ONES_AMONG},
        Volume(1, 2, 16, 13, 7),
    ),
    ("llama", {"inputs_embeds": torch.zeros(2, 5, 64)}, Volume(1, 2, 10, 10, 2)),
    ("llama", padded(), STAYED, {}, {"unpad": False}),
    *((name, ROW, Volume(1, 1, 8, 5, 2)) for name in ("llama", "bart", "qwen3_next")),
    # Documents of a head are counted once: BERT runs them as a padded batch, whose backbone runs
    # one row.
    ("bert", {**ROW, "labels": torch.tensor([0, 1])}, Volume(1, 1, 5, 5, 2, 3), CLASSES),
    ("bert", {**padded(), "labels": torch.tensor([0, 1, 0])}, RAN, CLASSES),
    # XLNet runs each length by itself, one document per row.
    ("xlnet", {**ROW, "labels": torch.tensor([0, 1])}, Volume(2, 2, 5, 5, 2, 3), CLASSES),
    # Both halves of an encoder-decoder.
    ("t5", padded(), Volume(1, 1, 2 * REAL, 2 * REAL, 3, 2 * PADDING), PAIRS),
    (
        "t5",
        {"input_ids": token_ids(2, 5), "labels": token_ids(2, 4)},
        Volume(1, 2, 18, 18, 2),
        PAIRS,
    ),
    ("t5", padded(), Volume(1, 3, 54, 2 * REAL, 3), PAIRS, {"unpad": False}),
    # Choices of questions.
    (
        "bert",
        {"input_ids": token_ids(6, 5).reshape(2, 3, 5)},
        Volume(1, 6, 30, 30, 6),
        {"task": "multiple-choice"},
    ),
]
"""Types, calls, what is counted, and configurations and options where there are some."""


@pytest.mark.parametrize("case", CALLS)
def test_a_call(case):
    model_type, call, expected, config, options = (*case, {}, {})[:5]
    model = tiny.build(model_type, **config).train()
    with autopack.enable(model, **options) as handle:
        model(**call)
        assert handle.tally.training == expected
        model(**call)
        assert handle.tally.training == expected.plus(expected)
        assert handle.tally.evaluation == Volume()


def test_evaluation_is_counted_apart_and_generation_not_at_all(model):
    with autopack.enable(model.eval()) as handle:
        with torch.no_grad():
            model(**padded())
            model.generate(token_ids(1, 4), max_new_tokens=3)
        assert (handle.tally.training, handle.tally.evaluation) == (Volume(), RAN)
        # Lightning leaves what `from_pretrained` gives in evaluation mode
        model(**padded()).loss.backward()
        with torch.no_grad():
            model.train()(**padded())
        assert (handle.tally.training, handle.tally.evaluation) == (RAN.plus(RAN), RAN)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_generation_of_an_encoder_decoder_is_not_counted(options):
    model = tiny.build("t5", task="seq2seq")
    prompts = {name: value for name, value in padded().items() if name != "labels"}
    with autopack.enable(model) as handle:
        model.generate(**prompts, max_new_tokens=3, **options)
        assert handle.tally.evaluation == Volume()
        assert str(handle.tally) == "no padded batch yet"


def test_compiled_calls_are_counted_and_break_no_graph():
    model = tiny.build("llama", attn_implementation="sdpa").train()
    with autopack.enable(model) as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(**padded())
        assert handle.tally.training == Volume(*(3 * number for number in RAN))
        torch._dynamo.reset()


def test_audits_and_checks_of_training_calls_are_not_counted():
    class Own(type(tiny.build("llama"))):
        def __init__(self, config, own=None):  # of which there is no twin
            super().__init__(config)

    model = Own(tiny.build("llama").config).train()
    with autopack.enable(model, check_every=1) as handle:
        assert handle.tally.training == handle.tally.evaluation == Volume()
        model(**padded())
        assert handle.checked.checks == 1
        autopack.audit(model)
        assert handle.checked.checks == 1
        assert (handle.tally.training, handle.tally.evaluation) == (RAN, Volume())


def test_handles_say_it_live(model, caplog):
    with autopack.enable(nn.Sequential(model)) as handle, caplog.at_level(logging.INFO):
        assert "trained:" not in repr(handle)
        model(**padded())
        said = "1 call, fill 100.0% (19 real tokens in 19 columns), 3.0 documents per row"
        assert f"  trained:   {said}\n" in repr(handle)
        model(**padded())
        assert re.search(r"trained: +2 calls, .*row, [\d,]+ real tokens per second\n", repr(handle))
        with torch.no_grad():
            model.eval()(**padded())
        assert f"  evaluated: {said}\n" in repr(handle)
        assert said in handle._repr_html_()

"""What a value has something for: its shape says it, or one line of a table by its name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import SequenceClassifierOutput

import autopack
from autopack import tiny
from autopack.layout.forms import AXES, Frame
from autopack.layout.ways import Of
from tests.conftest import FLOAT32, error, positions, token_ids

FRAME = Frame(2, 7, documents=5, labels=("labels",))
LENGTHS = (4, 9, 4)


@pytest.mark.parametrize(
    ("name", "value", "unit", "axis"),
    [
        ("input_ids", torch.zeros(2, 7), Of.TOKEN, 1),
        ("position_ids", torch.zeros(1, 7), Of.TOKEN, 1),
        ("decoder_position_ids", torch.zeros(1, 7), Of.TOKEN, 1),
        ("position_ids", torch.zeros(3, 2, 7), Of.TOKEN, 2),
        ("position_ids", torch.zeros(3, 1, 7), Of.TOKEN, 2),
        ("table", torch.zeros(1, 7), Of.UNKNOWN, None),
        ("labels", torch.zeros(5), Of.DOCUMENT, None),
        ("labels", torch.zeros(2, 7), Of.UNKNOWN, None),
        ("scale", torch.zeros(()), Of.CALL, None),
        ("return_dict", True, Of.CALL, None),
        ("names", ["a", "b"], Of.CALL, None),
        ("states", [torch.zeros(2, 7)], Of.UNKNOWN, None),
    ],
    ids=str,
)  # fmt: skip
def test_arguments(name, value, unit, axis):
    assert FRAME.unit_of(name, value) is unit
    assert FRAME.axis_of(name, value) == axis


def test_positions_in_as_many_sections_as_rows_have_columns():
    assert Frame(3, 3).axis_of("position_ids", torch.zeros(3, 3, 3)) == 2
    assert Frame(3, 3).unit_of("position_ids", torch.zeros(3, 2, 3)) is Of.UNKNOWN


def test_one_row_that_is_the_same_for_all():
    shared = Frame(2, 7, shared=True)
    assert shared.axis_of("table", torch.zeros(1, 7, 3)) == 1
    seen = []
    shared.changed(
        "table", torch.arange(7)[None], lambda value: seen.append(value.tolist()) or value
    )
    assert seen == [[list(range(7))] * 2]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_each_kind_of_positions_is_changed_by_itself(rows, columns, kinds):
    value = torch.randn(kinds, rows, columns)
    found = Frame(rows, columns).changed("position_ids", value, lambda part: part.flip(1))
    assert torch.equal(found, value.flip(2))


@dataclass
class Scored(SequenceClassifierOutput):
    pair_scores: torch.Tensor | None = None


class Scoring(transformers.BertForSequenceClassification):
    """Gives scores of pairs of tokens, (documents, tokens, tokens)."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        output_attentions=None,
        **others,
    ):
        found = self.bert(input_ids, attention_mask, position_ids=position_ids)
        last = found.last_hidden_state
        return Scored(logits=self.classifier(found.pooler_output), pair_scores=last @ last.mT)


@pytest.fixture
def scored():
    """What a head that gives such scores says of packed documents, and of each alone; it runs them
    alone."""
    torch.manual_seed(0)
    model = Scoring(tiny.config("bert")).eval()
    ids = token_ids(1, sum(LENGTHS))

    def run():
        with torch.no_grad():
            alone = [model(input_ids=part) for part in ids.split(LENGTHS, 1)]
            with autopack.enable(model, verify=False):
                found = model(
                    input_ids=ids,
                    position_ids=positions(LENGTHS),
                    output_attentions=True,
                    return_dict=True,
                )
        return found, alone

    return run


def test_a_new_field_of_a_head_is_one_line(scored, monkeypatch):
    monkeypatch.setitem(AXES, "pair_scores", (1, 2))
    found, alone = scored()
    assert found.pair_scores.shape == (3, 9, 9)
    for number, (length, each) in enumerate(zip(LENGTHS, alone, strict=True)):
        assert error(found.pair_scores[number, :length, :length], each.pair_scores[0]) < FLOAT32
        assert not found.pair_scores[number, length:].any()
        assert not found.pair_scores[number, :, length:].any()


def test_without_the_line_it_is_left_out(scored):
    found, _ = scored()
    assert found.logits.shape == (3, 2)
    assert found.pair_scores is None

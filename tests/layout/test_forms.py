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
from autopack.calls.outputs import restore
from autopack.layout import forms
from autopack.layout.forms import Field, Form, Frame
from autopack.layout.packed import PackedLayout
from autopack.layout.token_map import Batches, TokenMap, equally_long
from autopack.layout.ways import Of
from tests.conftest import FLOAT32, error, positions, token_ids
from tests.support.refusals import refused

FRAME = Frame(2, 7, documents=5, labels=("labels",))
LENGTHS = (4, 9, 4)


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("input_ids", torch.zeros(2, 7), Form(Of.TOKEN)),
        ("position_ids", torch.zeros(1, 7), Form(Of.TOKEN)),
        ("decoder_position_ids", torch.zeros(1, 7), Form(Of.TOKEN)),
        ("position_ids", torch.zeros(3, 2, 7), Form(Of.TOKEN, 2)),
        ("position_ids", torch.zeros(3, 1, 7), Form(Of.TOKEN, 2)),
        ("table", torch.zeros(1, 7), Form(Of.UNKNOWN)),
        ("labels", torch.zeros(5), Form(Of.DOCUMENT)),
        ("labels", torch.zeros(2, 7), Form(Of.UNKNOWN)),
        ("scale", torch.zeros(()), Form(Of.CALL)),
        ("scale", torch.zeros(1), Form(Of.CALL)),
        ("return_dict", True, Form(Of.CALL)),
        ("names", ["a", "b"], Form(Of.CALL)),
        ("states", [torch.zeros(2, 7)], Form(Of.UNKNOWN)),
        ("states", {"of": torch.zeros(2, 7)}, Form(Of.UNKNOWN)),
    ],
    ids=str,
)  # fmt: skip
def test_arguments(name, value, form):
    assert FRAME.form_of(name, value) == form


def test_positions_in_as_many_sections_as_rows_have_columns():
    assert Frame(3, 3).form_of("position_ids", torch.zeros(3, 3, 3)) == Form(Of.TOKEN, 2)
    assert Frame(3, 3).form_of("position_ids", torch.zeros(3, 2, 3)) == Form(Of.UNKNOWN)


def test_one_row_that_is_the_same_for_all():
    shared = Frame(2, 7, shared=True)
    assert shared.form_of("table", torch.zeros(1, 7, 3)) == Form(Of.TOKEN)
    seen = []
    shared.each(torch.arange(7)[None], Form(Of.TOKEN), lambda value: seen.append(value.tolist()) or value)
    assert seen == [[list(range(7))] * 2]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_each_kind_of_positions_is_changed_by_itself(rows, columns, kinds):
    value = torch.randn(kinds, rows, columns)
    frame = Frame(rows, columns)
    found = frame.each(value, frame.form_of("position_ids", value), lambda part: part.flip(1))
    assert torch.equal(found, value.flip(2))


@dataclass
class Scored(SequenceClassifierOutput):
    pair_scores: torch.Tensor | None = None
    by_layer: torch.Tensor | None = None


class Scoring(transformers.BertForSequenceClassification):
    """Gives scores of pairs of tokens, (documents, tokens, tokens), and some by layer, (layers, documents, tokens)."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, output_attentions=None, **others):
        found = self.bert(input_ids, attention_mask, position_ids=position_ids, output_hidden_states=True)
        last = found.last_hidden_state
        return Scored(
            logits=self.classifier(found.pooler_output),
            pair_scores=last @ last.mT,
            by_layer=torch.stack(found.hidden_states)[..., 0],
        )


@pytest.fixture
def scored():
    """What a head that gives such scores says of packed documents, and of each alone; it runs them alone."""
    torch.manual_seed(0)
    model = Scoring(tiny.config("bert")).eval()
    ids = token_ids(1, sum(LENGTHS))

    def run():
        with torch.no_grad():
            alone = [model(input_ids=part) for part in ids.split(LENGTHS, 1)]
            with autopack.enable(model, verify=False):
                found = model(input_ids=ids, position_ids=positions(LENGTHS), output_attentions=True, return_dict=True)
        return found, alone

    return run


def test_a_new_field_of_a_head_is_one_line(scored, monkeypatch):
    monkeypatch.setitem(forms.FIELDS, "pair_scores", Field((1, 2)))
    monkeypatch.setitem(forms.FIELDS, "by_layer", Field((2,), rows=1))
    found, alone = scored()
    assert found.pair_scores.shape == (3, 9, 9)
    assert found.by_layer.shape[1:] == (3, 9)
    for number, (length, each) in enumerate(zip(LENGTHS, alone, strict=True)):
        assert error(found.pair_scores[number, :length, :length], each.pair_scores[0]) < FLOAT32
        assert error(found.by_layer[:, number, :length], each.by_layer[:, 0]) < FLOAT32
        assert not found.pair_scores[number, length:].any()
        assert not found.pair_scores[number, :, length:].any()


def test_without_the_line_it_is_left_out(scored):
    found, _ = scored()
    assert found.logits.shape == (3, 2)
    assert found.pair_scores is None
    assert found.by_layer is None


REAL = torch.tensor([[1, 1, 1], [0, 1, 1]], dtype=torch.bool).numpy()
PADDING = TokenMap.of_real(REAL, torch.device("cpu"))


def test_the_line_serves_padded_batches_too(monkeypatch):
    packed = torch.randn(4, 1, 5, 2, requires_grad=True)
    with refused("unpad-refused"):
        restore({"by_layer": packed}, PADDING)
    monkeypatch.setitem(forms.FIELDS, "by_layer", Field((2,), rows=1))
    found = restore({"loss": packed.sum(), "by_layer": packed}, PADDING)["by_layer"]
    assert found.shape == (4, 2, 3, 2)
    assert torch.equal(found[:, torch.from_numpy(REAL)], packed[:, 0])
    (found**2).sum().backward()
    assert error(packed.grad, 2 * packed.detach()) < FLOAT32


def test_and_whole_models_that_run_on_documents_alone(monkeypatch):
    layout = PackedLayout.from_lengths([[2, 3], [4, 1]])
    batches = Batches.grouped(layout, equally_long)
    whole = torch.randn(4, 2, 5)
    outputs = [{"by_layer": torch.stack([batch.gather(part) for part in whole])} for batch in batches.maps]
    assert batches.together(outputs, lambda parts: None)["by_layer"] is None
    monkeypatch.setitem(forms.FIELDS, "by_layer", Field((2,), rows=1))
    assert torch.equal(batches.together(outputs, lambda parts: None)["by_layer"], whole)

"""Packed rows that a head cannot serve: wrong labels, choices, unknown models around a head; each
says why."""

import pytest
import torch
import transformers
from transformers import GPT2DoubleHeadsModel, LlamaForSequenceClassification

import autopack
from autopack import tiny
from autopack.tiny.models import randomize
from tests.conftest import FLOAT64, LENGTHS, error, positions
from tests.heads.models import (
    CLASSES,
    ENDS,
    IDS,
    STARTS,
    TASKS,
    MambaForSequenceClassification,
    agrees,
    mamba_classifier,
    packed,
    with_head,
)
from tests.support.refusals import refused, refused_before_any_token

WRONG = {
    "labels per token": {"labels": IDS},
    "labels per row": {"labels": CLASSES[:1]},
    "a number": {"labels": 1},
    "spans of the row": {"start_positions": torch.tensor([1, 10, 19, 25]), "end_positions": ENDS},
    "spans before": {"start_positions": STARTS - 1, "end_positions": ENDS},
    "spans per row": {"start_positions": STARTS[:1], "end_positions": ENDS},
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=[*WRONG])
def test_wrong_labels_are_refused_before_any_token_is_computed(arguments):
    model = with_head("llama") if "labels" in arguments else with_head("bert", "question-answering")
    with refused_before_any_token(model, "wrong-labels"):
        packed(model, **arguments)


def test_what_belongs_to_no_document_is_refused():
    model = with_head("bert")
    with autopack.enable(model):
        with refused("media-not-served"):
            packed(model, pixel_values=torch.zeros(1, 3, 8, 8))
        with refused("cache-given"):
            packed(model, use_cache=True)


def test_a_decoder_without_padding_token_is_told_to_set_one():
    model, stock = (with_head("llama") for _ in range(2))
    model.config.pad_token_id = None
    with autopack.enable(model):
        with refused("pad-token"):
            packed(model)
        model.config.pad_token_id = 127
        stock.config.pad_token_id = 127
        output = packed(model, **TASKS["sequence-classification"])
        agrees(model, stock, output, IDS[0].split(LENGTHS), TASKS["sequence-classification"])


def _with_choices(kind):
    torch.manual_seed(0)
    return kind(tiny.config("bert" if "Bert" in kind.__name__ else "gpt2")).double().eval()


@pytest.mark.parametrize("kind", [transformers.BertForMultipleChoice, GPT2DoubleHeadsModel])
def test_packed_rows_of_choices_are_refused(kind):
    """Nothing in a packed row says which documents are choices of one question."""
    model, stock = _with_choices(kind), _with_choices(kind)
    # one question of one choice
    choices = {"input_ids": IDS[None], "position_ids": positions(LENGTHS)[None]}
    with autopack.enable(model):
        with refused("result-per-row"):
            packed(model)
        with refused("result-per-row"):
            model(**choices)
        found = packed(getattr(model, model.base_model_prefix)).last_hidden_state
    backbone = getattr(stock, stock.base_model_prefix)
    expected = [backbone(input_ids=part).last_hidden_state for part in IDS.split(LENGTHS, 1)]
    assert error(found, torch.cat(expected, 1)) < FLOAT64


@pytest.mark.parametrize("training", [False, True])
def test_padded_batches_of_choices_that_a_call_names_stay_as_they_come(training):
    model, stock = (_with_choices(GPT2DoubleHeadsModel).train(training) for _ in range(2))
    ids = IDS[0, :30].view(2, 3, 5)
    mask = torch.ones_like(ids)
    mask[0, 1, 3:] = 0
    call = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids,
        "mc_labels": torch.tensor([0, 2]),
    }
    with autopack.enable(model) as handle:
        found, expected = model(**call), stock(**call)
        assert all(torch.equal(a, b) for a, b in zip(found[:4], expected[:4], strict=True))
        assert handle.enabled.tally.left == {
            "its head reads a token of each choice that the call names": 1
        }


class Wrapped(transformers.LlamaPreTrainedModel):
    """A model of no known head around one that has a result per row."""

    def __init__(self, config):
        super().__init__(config)
        self.inner = LlamaForSequenceClassification(config)

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return self.inner(input_ids=input_ids, position_ids=position_ids, **kwargs)


def test_a_head_inside_an_unknown_model_is_refused_and_serves_when_it_is_called():
    model = Wrapped(tiny.config("llama", task="sequence-classification")).double().eval()
    with autopack.enable(model, verify=False):
        with refused("result-per-row"):
            packed(model)
        found = packed(model.inner).logits
    expected = [model.inner(input_ids=part).logits for part in IDS.split(LENGTHS, 1)]
    assert error(found, torch.cat(expected)) < FLOAT64


class MeanOfRow(MambaForSequenceClassification):
    """Reads padding, and nothing says so."""

    def pool(self, states, mask):
        return states.mean(1)


def test_heads_of_ones_own_are_audited_and_one_that_reads_padding_is_refused():
    with autopack.enable(mamba_classifier()) as handle:
        assert "on a tiny copy of " in handle.verified
    model = MeanOfRow(tiny.config("mamba", num_labels=3)).eval()
    randomize(model, 0)
    with refused("not-exact"):
        autopack.enable(model)

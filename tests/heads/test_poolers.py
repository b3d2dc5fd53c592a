"""What a head makes of the tokens of a document: poolers, summaries and means."""

import copy

import pytest
import torch
import transformers
from torch import nn

import autopack
from autopack import tiny
from tests.conftest import FLOAT64, LENGTHS, error
from tests.heads.models import CLASSES, IDS, packed, serves, with_head

POOLED = [
    # reads padding: documents run alone
    *(("xlm", {"summary_type": kind}) for kind in ("last", "mean", "first")),
    # leaves padding out
    *(("modernbert", {"classifier_pooling": kind}) for kind in ("mean", "cls")),
]


@pytest.mark.parametrize(("model_type", "options"), POOLED)
def test_what_a_head_makes_of_all_tokens_is_of_those_of_a_document(model_type, options):
    serves(with_head(model_type, **options), {"labels": CLASSES}, verify=False)


def test_pretraining_has_labels_per_token_and_per_document():
    stock = transformers.BertForPreTraining(tiny.config("bert", task="masked-lm")).double().eval()
    model, next_sentence = copy.deepcopy(stock), torch.tensor([0, 1, 1, 0])
    with autopack.enable(model):
        output = packed(model, labels=IDS, next_sentence_label=next_sentence)
    parts = [stock(input_ids=part) for part in IDS.split(LENGTHS, 1)]
    logits = torch.cat([part.prediction_logits[0] for part in parts])
    relations = torch.cat([part.seq_relationship_logits for part in parts])
    assert error(output.prediction_logits[0], logits) < FLOAT64
    assert error(output.seq_relationship_logits, relations) < FLOAT64
    cross_entropy = nn.functional.cross_entropy
    assert (
        abs(output.loss - cross_entropy(logits, IDS[0]) - cross_entropy(relations, next_sentence))
        < FLOAT64
    )

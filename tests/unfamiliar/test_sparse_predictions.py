"""Models that predict labelled tokens alone, (labelled, classes), where labels are given."""

import copy

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import FLOAT32
from tests.engine import IGNORED, declared, ids, mean_loss
from tests.support.padded import batch, mask_of

transformers = pytest.importorskip("transformers", minversion="4.48")
LENGTHS = (7, 9, 8)


@pytest.fixture
def stock():
    torch.manual_seed(0)
    config = tiny.config("modernbert", sparse_prediction=True)
    return transformers.ModernBertForMaskedLM(config).train()


def _labels(tokens):
    return tokens.where(tokens % 5 < 2, IGNORED)


def test_packed_rows_have_the_loss_of_their_documents(stock):
    model, tokens = copy.deepcopy(stock), ids(lengths=LENGTHS)
    row, labels = {"input_ids": tokens, **declared(model, lengths=LENGTHS)}, _labels(tokens)
    with autopack.enable(model):
        output, logits = model(**row, labels=labels), model(**row).logits
    parts = tokens.split(LENGTHS, 1)
    labelled = [stock(input_ids=part, labels=_labels(part)) for part in parts]
    loss = mean_loss(
        [each.loss for each in labelled], [int((_labels(part) != IGNORED).sum()) for part in parts]
    )
    assert float((output.loss - loss).abs()) < FLOAT32
    assert torch.allclose(output.logits, torch.cat([each.logits for each in labelled]), atol=1e-5)
    assert torch.allclose(
        logits, torch.cat([stock(input_ids=part).logits for part in parts], dim=1), atol=1e-5
    )


def test_padded_batches_have_stocks_loss(stock):
    model, padded = copy.deepcopy(stock), batch("masked LM", mask_of((12, 7, 5)))
    padded["labels"] = _labels(padded["labels"])
    with autopack.enable(model) as handle:
        assert float((model(**padded).loss - stock(**padded).loss).abs()) < FLOAT32
        assert handle.tally.batches == 1

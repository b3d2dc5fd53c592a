"""Models that predict labelled tokens alone, (labelled, classes), where labels are given: classes of the user's too."""

from __future__ import annotations

import copy

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import FLOAT32

transformers = pytest.importorskip("transformers", minversion="4.48")
LENGTHS = (7, 9, 8)
BOUNDS = ((0, 7), (7, 16), (16, 24))


class MineForMaskedLM(transformers.ModernBertForMaskedLM):
    """A class of the user's; transformers chooses its loss by the end of its name."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.fixture(params=[transformers.ModernBertForMaskedLM, MineForMaskedLM])
def stock(request):
    torch.manual_seed(0)
    return request.param(tiny.config("modernbert", sparse_prediction=True)).train()


def _labels(ids):
    drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    return torch.where(drawn < 0.4, ids, -100)


def test_packed_rows_have_the_loss_of_their_documents(stock):
    model = copy.deepcopy(stock)
    ids = tiny.tokens(stock.config, 1, sum(LENGTHS))
    labels, positions = _labels(ids), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with autopack.enable(model):
        output = model(input_ids=ids, position_ids=positions, labels=labels)
        logits = model(input_ids=ids, position_ids=positions).logits
    total, parts, alone = 0.0, [], []
    for first, end in BOUNDS:
        here = {"input_ids": ids[:, first:end], "labels": labels[:, first:end]}
        found, count = stock(**here), int((here["labels"] != -100).sum())
        total, parts = total + found.loss * count, [*parts, found.logits]
        alone.append(stock(input_ids=ids[:, first:end]).logits)
    counted = int((labels != -100).sum())
    assert float((output.loss - total / counted).abs()) < FLOAT32
    assert torch.allclose(output.logits, torch.cat(parts), atol=1e-5)
    assert torch.allclose(logits, torch.cat(alone, dim=1), atol=1e-5)


def test_padded_batches_have_stocks_loss(stock):
    model = copy.deepcopy(stock)
    ids, mask = tiny.tokens(stock.config, 3, 12), (torch.arange(12) < torch.tensor([[12], [7], [5]])).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": _labels(ids).masked_fill(mask == 0, -100)}
    with autopack.enable(model) as handle:
        assert float((model(**batch).loss - stock(**batch).loss).abs()) < FLOAT32
        assert handle.tally.batches == 1

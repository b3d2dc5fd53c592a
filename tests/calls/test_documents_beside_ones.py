"""Packed rows with restarting positions beside a mask of ones, as LLaMA-Factory's `packing: true`
makes them."""

import logging

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import alone_loss, positions

LENGTHS = (7, 12, 5)
WARNING = "autopack keeps the documents in packed rows"
FLOAT32, LEAK = 1e-5, 1e-3


def rows(pad=0, **more):
    """A row of documents, and `pad` tokens of padding that nothing marks but a position of 0 and a
    label of -100."""
    ids = tiny.tokens(None, 1, sum(LENGTHS) + pad)
    where = positions([*LENGTHS, *[1] * pad])
    labels = ids.index_fill(1, torch.arange(sum(LENGTHS), ids.shape[1]), -100)
    return {"input_ids": ids, "position_ids": where, "labels": labels, **more}


def ones(batch):
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


@pytest.mark.parametrize("pad", [0, 1, 2, 9])
def test_they_are_kept_apart_which_is_said_once_and_padding_that_nothing_marks_is_none(pad, caplog):
    model, batch = tiny.build("llama", attn_implementation="sdpa"), ones(rows(pad))
    expected = float(alone_loss(model, rows()["input_ids"], LENGTHS))
    assert abs(float(model(**batch).loss) - expected) > LEAK, (
        "the control: stock lets them see each other"
    )
    with caplog.at_level(logging.WARNING, "autopack"), autopack.enable(model) as handle:
        for _ in range(3):
            assert abs(float(model(**batch).loss) - expected) <= FLOAT32
    assert [WARNING in record.getMessage() for record in caplog.records] == [True]
    volume = handle.tally.training
    counted = pad if pad < 2 else 0  # one may be a document
    found = (volume.columns, volume.tokens, volume.documents)
    each = (sum(LENGTHS) + pad, sum(LENGTHS) + counted, len(LENGTHS) + counted)
    assert found == tuple(3 * number for number in each)

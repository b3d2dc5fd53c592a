"""Batches that look padded and bring no mask are pointed out once, where their tokens are on the
host."""

import logging

import pytest
import torch

import autopack
from autopack import tiny
from autopack.packing import HostBatch
from tests.conftest import positions, token_ids
from tests.support.padded import tally_of

PAD = 0


def tokens(*padding, left=False):
    """Rows of nine columns with so many padding tokens each."""
    ids = token_ids(len(padding), 9).clamp(min=1)
    for row, pads in zip(ids, padding, strict=True):
        row[slice(pads) if left else slice(9 - pads, None)] = PAD
    return ids


PADDED = tokens(0, 3, 2, 5)


def warnings(caplog):
    return [
        record.getMessage() for record in caplog.records if "looks padded" in record.getMessage()
    ]


@pytest.fixture
def llama(caplog):
    model = tiny.build("llama", pad_token_id=PAD).train()
    with autopack.enable(model), caplog.at_level(logging.WARNING):
        yield model


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_it_is_said_once_and_names_rows_and_token(llama, caplog, left, trains):
    for _ in range(2):
        llama.train(trains)(input_ids=tokens(0, 3, 2, 5, left=left))
    (said,) = warnings(caplog)
    assert "3 of its 4 rows" in said
    assert "pad_token_id (0)" in said
    assert "without an attention_mask" in str(tally_of(llama))


@pytest.mark.parametrize(
    "call",
    [
        {"input_ids": tokens(0, 0, 0, 0)},
        {"input_ids": tokens(1, 1, 1, 1)},  # every text ends with a token that is padding as well
        {"input_ids": tokens(0, 0, 0, 5)},  # the last row of a corpus that is cut into rows
        {"input_ids": tokens(5)},
        {"input_ids": PADDED, "attention_mask": torch.ones(4, 9)},
        {"input_ids": PADDED, "attention_mask": (PADDED != PAD).long()},
        {"input_ids": tokens(4, 4)[:1], "position_ids": positions((5, 4))},
    ],
)
def test_other_calls_are_not_pointed_out(llama, caplog, call):
    llama(**call)
    assert not warnings(caplog)
    assert not tally_of(llama).unmasked


def test_tokens_on_a_device_are_looked_at_only_where_the_host_knows_them(caplog):
    model = tiny.build("llama", pad_token_id=PAD, dtype=torch.bfloat16).train()
    with autopack.enable(model, verify=False), caplog.at_level(logging.WARNING):
        model.to("meta")
        model(input_ids=PADDED.to("meta"))  # would raise where it read a value
        assert not warnings(caplog)
        model(**HostBatch(input_ids=PADDED).to("meta"))
        assert len(warnings(caplog)) == 1

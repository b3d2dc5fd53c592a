"""Losses that leave out another label than -100 (`ignore_index`)."""

from __future__ import annotations

import pytest

import autopack
from autopack import tiny
from tests.calls.agreement import agree
from tests.conftest import LENGTHS, positions, spans, token_ids
from tests.support.padded import PADDED, batch, build, mask_of, twins, unpredicted

KINDS = ["llama", "gpt2", "qwen3_moe"]
IGNORED = 3


@pytest.mark.parametrize("model_type", KINDS)
def test_packed_rows(model_type):
    model, stock = (tiny.build(model_type) for _ in range(2))
    ids = token_ids()
    labels = ids.clone()
    labels[0, 2:4] = IGNORED
    total = counted = 0
    for first, end in spans(LENGTHS):
        here = labels[:, first:end]
        targets = int((here[:, 1:] != IGNORED).sum())
        total += targets * stock(input_ids=ids[:, first:end], labels=here, ignore_index=IGNORED).loss.item()
        counted += targets
    with autopack.enable(model):
        found = model(input_ids=ids, position_ids=positions(LENGTHS), labels=labels, ignore_index=IGNORED).loss.item()
    assert abs(found - total / counted) < 1e-5


@pytest.mark.parametrize("model_type", KINDS)
def test_padded_batches(model_type):
    stock, model = twins(build(model_type))
    mask = mask_of(PADDED)
    inputs = batch("causal LM", mask)
    inputs["labels"] = inputs["input_ids"].masked_fill(unpredicted(mask), IGNORED)
    with autopack.enable(model) as handle:
        agree(model, stock, inputs, ignore_index=IGNORED)
        agree(model, stock, inputs)  # there it is a label like any other
        assert handle.tally.batches == 1


def test_feed_forward_layers_in_chunks_are_no_window():
    stock, model = twins(build("bert", "masked LM", chunk_size_feed_forward=1))
    inputs = batch("masked LM", mask_of(PADDED, "holes"))
    with autopack.enable(model) as handle:
        agree(model, stock, inputs)
        assert "windows" not in repr(handle)

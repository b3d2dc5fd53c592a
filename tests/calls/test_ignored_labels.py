"""Losses that leave out another label than -100 (`ignore_index`)."""

import pytest

import autopack
from tests.engine import Call, ids, must_be_exact
from tests.support.padded import PADDED, agree, batch, build, mask_of, twins, unpredicted

KINDS = ["llama", "gpt2", "qwen3_moe"]
IGNORED = 3


@pytest.mark.parametrize("model_type", KINDS)
def test_packed_rows(model_type):
    """A sum over a number of items, of which the label that is left out, which a document has, is
    none."""
    given = {"ignore_index": int(ids()[0, 3]), "num_items_in_batch": 50}
    must_be_exact(model_type, Call(given=given, reduction="sum").row)


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

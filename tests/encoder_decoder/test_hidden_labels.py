"""A model that makes the decoder's tokens of labels may hide those that are padding tokens from its
decoder.

`EncoderDecoderModel` does; BART and T5, which make them too, hide none of them.
"""

import copy

import pytest
import torch

import autopack
from autopack import tiny
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PAD, START, EXACT, WRONG = 0, 1, 1e-5, 1e-3
"""Of a deviation of the logits in float32; a token that is seen and should not be is worth 1e-2."""


def build(start=START):
    model = tiny.build("encoder-decoder", task="seq2seq")
    model.config.decoder_start_token_id = start
    return copy.deepcopy(model), model


def batch():
    ids, labels = tiny.tokens(None, 2, 9, seed=1), tiny.tokens(None, 2, 7, seed=2)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels[1, 4:] = -100
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, "labels": labels}


def difference(found, expected, labels):
    errors = (found.logits - expected.logits).abs().amax(-1)[labels != -100]
    return float(errors.max() / expected.logits.std())


@pytest.mark.parametrize(
    ("start", "column", "label", "packs"),
    [
        (START, 3, PAD, False),
        (START, 3, -100, False),
        (START, 6, PAD, True),  # the last one of the longest row: no later one sees it
        (START, None, None, True),
        (PAD, None, None, False),  # the first token is hidden
    ],
)
@torch.no_grad()
def test_a_token_that_is_hidden_from_later_ones_keeps_the_padding(start, column, label, packs):
    stock, model = build(start)
    given = batch()
    if column is not None:
        given["labels"][0, column] = label
    handle = autopack.enable(model)
    found = difference(model(**given), stock(**given), given["labels"])
    assert found < EXACT if packs else found == 0.0
    assert handle.tally.batches == int(packs)
    assert column != 3 or [
        reason for reason in handle.tally.left if "hides it from its decoder" in reason
    ]


@torch.no_grad()
def test_tokens_that_are_given_are_hidden_from_nobody():
    """The control: with the decoder's tokens in the call, the same label is seen, by stock too."""
    stock, model = build()
    given = batch()
    given["labels"][0, 3] = PAD
    made = given["labels"].masked_fill(given["labels"] == -100, PAD)
    given["decoder_input_ids"] = torch.cat([torch.full((2, 1), START), made[:, :-1]], dim=1)
    handle = autopack.enable(model)
    seen = model(**given)
    assert handle.tally.batches == 1
    del given["decoder_input_ids"]
    assert difference(seen, stock(**given), given["labels"]) > WRONG


@torch.no_grad()
def test_packed_rows_with_such_a_label_are_refused():
    """A document alone, in the default call, hides it."""
    stock, model = build()
    given = batch()
    row = {
        "input_ids": given["input_ids"][:1],
        "attention_mask": torch.tensor([[1] * 5 + [2] * 4]),
        "labels": given["labels"][:1],
        "decoder_attention_mask": torch.tensor([[1] * 3 + [2] * 4]),
    }
    autopack.enable(model)
    alone = [
        stock(input_ids=ids, labels=labels).logits
        for ids, labels in zip(
            row["input_ids"].split((5, 4), 1), row["labels"].split((3, 4), 1), strict=True
        )
    ]
    assert (model(**row).logits - torch.cat(alone, dim=1)).abs().max() < EXACT * alone[0].std()
    row["labels"] = row["labels"].clone()
    row["labels"][0, 1] = PAD
    with refused("decoder-tokens"):
        model(**row)

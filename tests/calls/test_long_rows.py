"""Rows longer than the positions that a model has, of documents that are not: tables and buffers end before the row.

References are the documents alone and the stock padded batch, in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.registry import first_position
from autopack.tiny.models import randomize
from tests.conftest import FLOAT64, error, positions, spans, token_ids
from tests.support.padded import packs_at_once, tally_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS, MOST = (12, 5, 9, 7), 16
"""33 tokens, for models of 16 positions."""
IDS = token_ids()
NUMBER = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None]
IN_FLOAT32 = 1e-5
"""Some compute the discrete Fourier transform, or norms, in float32 whatever the model's dtype."""
TYPES = [
    "albert", "bert", "big_bird", "camembert", "convbert", "electra", "ernie", "fnet", "ibert", "megatron-bert",
    "mpnet", "nystromformer", "rembert", "roberta", "roformer", "xlm-roberta", "yoso",
]  # fmt: skip
CUT = ["big_bird", "convbert", "fnet", "nystromformer", "roformer", "yoso"]
"""Those whose forward takes as many entries of a buffer or table as the row has columns."""


def build(model_type: str, task: str = "masked-lm") -> Any:
    made = tiny.config(model_type, task=task)
    most = MOST + first_position(made)
    landmarks = {"segment_means_seq_len": 16, "num_landmarks": 16} if model_type == "nystromformer" else {}
    return tiny.build(model_type, task=task, max_position_embeddings=most, **landmarks).double()


def alone(model: Any) -> torch.Tensor:
    return torch.cat([model(input_ids=IDS[:, a:b]).logits for a, b in spans(LENGTHS)], dim=1)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(IDS[0].split(LENGTHS), batch_first=True)
    return {"input_ids": ids, "attention_mask": (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()}


@pytest.mark.parametrize("model_type", TYPES)
def test_documents_that_fit_are_exact_in_rows_that_do_not(model_type):
    model = build(model_type)
    expected, first = alone(model), first_position(model.config)
    given = {"attention_mask": NUMBER}, {"position_ids": positions(LENGTHS, start=first)}, {"seq_idx": NUMBER}
    turned = torch.cat([part.flip(0) for part in IDS[0].split(LENGTHS)])[None]
    if model_type in CUT:
        with pytest.raises((RuntimeError, IndexError)):
            model(input_ids=IDS, **given[1])  # stock
    with autopack.enable(model, verify=False):
        for said in given:
            assert error(model(input_ids=IDS, **said).logits, expected) <= IN_FLOAT32
        rows = model(input_ids=torch.cat([IDS, turned]), attention_mask=NUMBER.expand(2, -1)).logits
        assert error(rows[:1], expected) <= IN_FLOAT32
        padded_row = torch.nn.functional.pad(IDS, (0, 6)), torch.nn.functional.pad(NUMBER, (0, 6))
        found = model(input_ids=padded_row[0], attention_mask=padded_row[1]).logits[:, : IDS.shape[1]]
        assert error(found, expected) <= IN_FLOAT32


@pytest.mark.parametrize("model_type", TYPES)
def test_padded_batches_of_more_tokens_than_positions(model_type):
    stock = build(model_type)
    model, real = copy.deepcopy(stock), batch()["attention_mask"].bool()
    expected = stock(**batch()).logits
    with packs_at_once(model, verify=False):
        assert error(model(**batch()).logits[real], expected[real]) <= IN_FLOAT32
        if model_type in ("big_bird", "roformer", "bert"):
            assert tally_of(model).batches == 1  # it ran as one row of 33 tokens


@pytest.mark.parametrize("model_type", ["big_bird", "convbert", "roformer"])
def test_heads_with_one_result_per_document(model_type):
    model = build(model_type, task="sequence-classification")
    model.config.pad_token_id = 0
    expected = torch.cat([model(input_ids=IDS[:, a:b]).logits for a, b in spans(LENGTHS)])
    with autopack.enable(model, verify=False):
        assert error(model(input_ids=IDS, attention_mask=NUMBER).logits, expected) <= FLOAT64


@pytest.mark.parametrize("model_type", ["big_bird", "roformer"])
def test_decoders(model_type):
    model = build(model_type, task="causal-lm")
    expected = torch.cat([model(input_ids=IDS[:, a:b], use_cache=False).logits for a, b in spans(LENGTHS)], dim=1)
    with autopack.enable(model, verify=False):
        assert error(model(input_ids=IDS, attention_mask=NUMBER).logits, expected) <= FLOAT64


def test_kinds_of_tokens_that_are_given_are_taken():
    model = build("big_bird")
    kinds = torch.arange(IDS.shape[1])[None] % 2
    parts = [model(input_ids=IDS[:, a:b], token_type_ids=kinds[:, a:b]).logits for a, b in spans(LENGTHS)]
    with autopack.enable(model, verify=False):
        found = model(input_ids=IDS, attention_mask=NUMBER, token_type_ids=kinds).logits
    assert error(found, torch.cat(parts, dim=1)) <= FLOAT64


def test_a_document_that_does_not_fit_fails_as_it_does_alone():
    model = transformers.BertModel(tiny.config("bert", task="masked-lm", max_position_embeddings=8)).eval()
    randomize(model, 0)
    with pytest.raises((RuntimeError, IndexError)):
        model(IDS[:, :12])
    with autopack.enable(model, verify=False), pytest.raises((RuntimeError, IndexError)):
        model(input_ids=IDS, attention_mask=NUMBER)

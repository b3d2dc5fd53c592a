"""XLM and Flaubert, which count the tokens of a row by its padding tokens."""

import pytest
import torch

import autopack
from autopack import tiny
from tests.engine import Result, check
from tests.support.refusals import refused

DOCUMENTS = ([9, 20, 31, 42], [53, 64, 75])


def packed(model, row):
    """One row of documents, of which an empty one stands for two columns of padding."""
    pad = model.config.pad_index
    ids = [token for document in row for token in document or [pad, pad]]
    positions = [
        place for document in row for place in (range(len(document)) if document else (0, 1))
    ]
    mask = [int(bool(document)) for document in row for _ in document or (0, 1)]
    found = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    return {name: torch.tensor([values]) for name, values in found.items()}


def built(model_type):
    task = "causal-lm" if model_type == "xlm" else "masked-lm"
    return tiny.build(model_type, task=task, dtype=torch.float64)


def squared(model, documents):
    return Result.of(model, documents, sum(logits.square().sum() for logits in documents))


ROWS = [[[], *DOCUMENTS], [DOCUMENTS[0], [], DOCUMENTS[1]], [*DOCUMENTS, []]]


@pytest.mark.parametrize("row", ROWS, ids=["left", "between", "right"])
@pytest.mark.parametrize("model_type", ["xlm", "flaubert"])
def test_padding_tokens_anywhere_in_the_row(model_type, row):
    model = built(model_type)
    alone = [model(input_ids=torch.tensor([document])).logits[0] for document in DOCUMENTS]
    expected = squared(model, alone)
    autopack.enable(model)
    arguments = packed(model, row)
    logits = model(**arguments).logits[arguments["attention_mask"] == 1]
    check(squared(model, logits.split([len(d) for d in DOCUMENTS])), expected)


@pytest.mark.parametrize("model_type", ["xlm", "flaubert"])
def test_a_document_that_holds_the_padding_token_is_refused(model_type):
    model = built(model_type)
    autopack.enable(model)
    arguments = packed(model, [*DOCUMENTS])
    arguments["input_ids"][0, 1] = model.config.pad_index
    with refused("pad-token"):
        model(**arguments)


@pytest.mark.parametrize("model_type", ["xlm", "flaubert"])
def test_other_models_and_other_calls_are_stocks(model_type):
    stock, model = built(model_type), built(model_type)
    call = {"input_ids": torch.tensor([[9, 20, stock.config.pad_index, 31], [53, 64, 75, 80]])}
    before = stock(**call).logits
    with autopack.enable(model):
        torch.testing.assert_close(stock(**call).logits, before, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(model(**call).logits, before, rtol=0, atol=0, equal_nan=True)

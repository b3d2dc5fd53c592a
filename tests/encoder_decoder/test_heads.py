"""Heads of encoder-decoders with one result per row: packed documents run alone, and each gets its
own result."""

import copy

import pytest
import torch

import autopack
from tests.conftest import FLOAT32, LEAK, LENGTHS, error, positions, token_ids
from tests.engine import in_rows, numbered
from tests.heads.models import CLASSES, ENDS, STARTS, serves, with_head
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

CLASSIFIED = ("bart", "mbart", "mvp", "plbart", "t5", "mt5", "umt5", "t5gemma")
ANSWERED = ("bart", "mbart", "t5")
_ANSWERS = {"start_positions": STARTS, "end_positions": ENDS}
TASKS = {
    **{name: ("sequence-classification", {"labels": CLASSES % 2}) for name in CLASSIFIED},
    **{f"{name}, answers": ("question-answering", _ANSWERS) for name in ANSWERED},
}


def documents(model, lengths=LENGTHS, seed=0):
    """Tokens (1, T) of documents that end with the token at which these heads read."""
    ids = token_ids(1, sum(lengths), seed)
    ids[0, torch.tensor(lengths).cumsum(0) - 1] = model.config.eos_token_id
    return ids


def with_task(name):
    """A stock model, and labels for its task."""
    task, labels = TASKS[name]
    return with_head(name.partition(",")[0], task, torch.float32), labels


def enabled(name):
    stock, labels = with_task(name)
    model = copy.deepcopy(stock)
    autopack.enable(model, verify=False)
    return model, stock, labels


def alone(stock, ids, lengths=LENGTHS):
    return torch.cat([stock(document).logits for document in ids.split(tuple(lengths), dim=1)])


@pytest.mark.parametrize("name", TASKS)
def test_each_document_gets_what_it_gets_alone(name):
    stock, labels = with_task(name)
    serves(stock, labels, FLOAT32, documents(stock), verify=False)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_audit_says_so(name):
    """Stock reads one result off the row."""
    model, stock, _ = enabled(name)
    assert autopack.audit(model).exact
    whole = stock(documents(stock)).logits
    assert len(whole) == 1
    assert error(whole, alone(stock, documents(stock))[-1:]) > LEAK


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_rows_with_padding_declared_by_segment_ids(name):
    model, stock, _ = enabled(name)
    ids, mask = (
        torch.nn.functional.pad(each, (0, 3)) for each in (documents(stock), numbered(LENGTHS))
    )
    assert (
        error(model(input_ids=ids, attention_mask=mask).logits, alone(stock, documents(stock)))
        < FLOAT32
    )


def test_documents_that_begin_midway_are_refused_where_positions_are_not_taken():
    model, stock, _ = enabled("bart")
    with refused("first-position"):
        model(input_ids=documents(stock), position_ids=positions(LENGTHS) + 5)


def test_padded_batches_stay_as_they_came():
    model, stock, labels = enabled("bart")
    ids = in_rows(documents(stock)[0].split(LENGTHS))
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), **labels}
    assert torch.equal(model(**batch).loss, stock(**batch).loss)

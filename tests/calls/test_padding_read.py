"""What is read at padding counts there as it does in stock: such batches keep their padding, or the call raises.

A batch that runs without its padding gives zeros there. A model at which nobody looks (`packs_at_once`) shows the
difference that each of these readers would make.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopack
from autopack import tiny
from tests.support.padded import packs_at_once
from tests.support.padding_readers import EXACT, FOUND_OUT, IS_READ, WRONG, backbone, batch, same_gradients, twins

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(64, 8, bidirectional=True, batch_first=True)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(states)[0][:, 0].square().sum()


def late_interaction(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ColBERT's score of the first row as a query that is expanded by its padding, and the others as documents."""
    query, found = F.normalize(states[:1], dim=-1), F.normalize(states[1:], dim=-1)
    scores = torch.einsum("qnd,bmd->bnm", query, found).masked_fill(mask[1:, None] == 0, -2.0)
    return scores.max(-1).values.sum()


READERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the mean over all columns": lambda states, mask: states.mean(1).square().sum(),
    "the last column": lambda states, mask: states[:, -1].square().sum(),
    "the largest of all columns": lambda states, mask: states.max(1).values.sum(),
    "squares, whose slope is nothing at zero": lambda states, mask: states.square().mean(),
    "late interaction": lambda states, mask: late_interaction(states.flip(0), mask.flip(0)),
    "a recurrent layer": Lstm(),
}
OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the mean over tokens": lambda states, mask: (
        ((states * mask[..., None]).sum(1) / mask.sum(1)[:, None]).square().sum()
    ),
    "the first column": lambda states, mask: states[:, 0].square().sum(),
    "tokens by index": lambda states, mask: states[mask.bool()].square().sum(),
    "the last token": lambda states, mask: states[torch.arange(len(mask)), mask.sum(1) - 1].square().sum(),
    "a softmax over tokens": lambda states, mask: states[..., 0].masked_fill(mask == 0, -1e9).softmax(1)[:, 0].sum(),
    "labels of tokens": lambda states, mask: F.cross_entropy(
        states.transpose(1, 2), torch.where(mask.bool(), 3, -100), ignore_index=-100
    ),
}


def step(model: Any, given: dict[str, torch.Tensor], reads: Callable[..., torch.Tensor]) -> float:
    """The loss of one call; its gradients are added to those of the model."""
    loss = reads(model(**given)[0], given["attention_mask"])
    loss.backward()
    return float(loss)


@pytest.mark.parametrize("kind", READERS)
def test_who_reads_padding_gets_what_stock_gives(kind):
    stock, model = twins(backbone())
    given = batch(model)
    handle = autopack.enable(model)
    for number in range(6):
        found, expected = step(model, given, READERS[kind]), step(stock, given, READERS[kind])
        assert found == pytest.approx(expected, rel=EXACT), number
    assert same_gradients(model, stock)
    assert handle.tally.batches == 0
    assert sum(count for reason, count in handle.tally.left.items() if IS_READ in reason) == 5
    with torch.no_grad():
        states = model(**given)[0], stock(**given)[0]
        assert torch.equal(*states), "in evaluation too, from then on"
    autopack.disable(model)
    packs_at_once(model)
    assert step(model, given, READERS[kind]) != pytest.approx(step(stock, given, READERS[kind]), rel=WRONG)


@pytest.mark.parametrize("kind", OTHERS)
def test_who_reads_tokens_alone_is_served_without_padding(kind):
    """The first batch, and the second, the fourth and the eighth, run as they came."""
    stock, model = twins(backbone())
    given = batch(model)
    handle = autopack.enable(model)
    served = []
    for _ in range(9):
        before = handle.tally.batches
        assert step(model, given, OTHERS[kind]) == pytest.approx(step(stock, given, OTHERS[kind]), rel=EXACT)
        served.append(handle.tally.batches > before)
    assert served == [number not in (1, 2, 4, 8) for number in range(1, 10)]
    assert same_gradients(model, stock)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4).filter(lambda found: len(set(found)) > 1),
    column=st.integers(-12, 11),
    calls=st.integers(2, 4),
)
def test_whichever_column_is_read(lengths, column, calls):
    """Of some rows it may be a token, of some padding: exact in each call, and in all calls of a step."""
    stock, model = twins(backbone())
    column = column % max(lengths)
    given = batch(model, tuple(lengths))
    with autopack.enable(model) as handle:
        for _ in range(3):
            losses = []
            for which in (model, stock):
                each = [which(**given)[0][:, column].square().sum() for _ in range(calls)]
                torch.stack(each).sum().backward()
                losses.append(float(sum(each)))
            assert losses[0] == pytest.approx(losses[1], rel=EXACT)
        is_read = any(IS_READ in reason for reason in handle.tally.left)
    assert is_read == (column >= min(lengths))


def test_all_calls_before_the_first_gradient_run_as_they_came():
    """A step of several calls, as contrastive trainers make them, learns from none of which that was not known."""
    model = backbone()
    given = batch(model)
    handle = autopack.enable(model)
    states = [model(**given)[0] for _ in range(7)]
    assert handle.tally.batches == 0
    sum((each * given["attention_mask"][..., None]).sum() for each in states).backward()
    for _ in range(7):  # the eighth of all is looked at
        model(**given)
    assert handle.tally.batches == 6


def test_a_reader_that_begins_later_is_found_at_the_next_power_of_two():
    stock, model = twins(backbone())
    given = batch(model)
    autopack.enable(model)
    for _ in range(3):
        step(model, given, OTHERS["the mean over tokens"])
    reads = READERS["the mean over all columns"]
    for _ in range(4):
        assert step(model, given, reads) == pytest.approx(step(stock, given, reads), rel=EXACT)


def test_results_without_a_gradient_keep_their_padding():
    """Features of a frozen model: nothing says whether what is trained on them reads padding."""
    stock, model = twins(backbone().requires_grad_(False))
    given = batch(model)
    handle = autopack.enable(model)
    for _ in range(3):
        assert torch.equal(model(**given)[0], stock(**given)[0])
    assert list(handle.tally.left) == ["nobody can tell whether its results at padding are read: they get no gradient"]
    with torch.no_grad():
        model(**given)
    assert handle.tally.batches == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_a_batch_again_as_it_was_run(reentrant):
    stock, model = twins(backbone())
    given = batch(model)
    handle = autopack.enable(model)
    embedded = model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()

    def run(which: Any) -> Any:
        def call(states):
            return which(inputs_embeds=states, attention_mask=given["attention_mask"])[0]

        return checkpoint(call, embedded, use_reentrant=reentrant)

    for _ in range(6):
        losses = []
        for which in (model, stock):
            loss = OTHERS["the mean over tokens"](run(which), given["attention_mask"])
            loss.backward()
            losses.append(float(loss))
        assert losses[0] == pytest.approx(losses[1], rel=EXACT)
    assert same_gradients(model, stock)
    assert handle.tally.batches > 0


def test_what_a_mask_hides_and_is_no_padding_keeps_its_place():
    """ColBERT's queries are expanded by mask tokens that attention does not see, and that are scored all the same."""
    stock, model = twins(backbone())
    given = batch(model)
    expanded = given["input_ids"].masked_fill(given["attention_mask"] == 0, 5)
    handle = autopack.enable(model.eval())
    stock.eval()
    with torch.no_grad():
        found, expected = (
            which(input_ids=expanded, attention_mask=given["attention_mask"])[0] for which in (model, stock)
        )
        assert torch.equal(found, expected)
        assert list(handle.tally.left) == ["its mask hides tokens that are not the pad token (5), which may be read"]
        model(**given)
    assert handle.tally.batches == 1


def test_answers_are_looked_for_in_all_columns_in_evaluation_too():
    """As run_qa does: the best start and end, whatever column they are in."""
    stock, model = twins(tiny.build("bert", task="question-answering").eval())
    given = batch(model)
    with torch.no_grad(), autopack.enable(model):
        found, expected = model(**given), stock(**given)
    assert torch.equal(found.start_logits, expected.start_logits)


def test_gradients_that_are_no_numbers_say_nothing():
    """A scaler of losses begins so high that the first steps overflow, and infinity times a mask is no number."""
    model = backbone()
    given = batch(model)
    handle = autopack.enable(model)
    for scale in (float("inf"), float("inf"), 1.0, 1.0):
        loss = OTHERS["the mean over tokens"](model(**given)[0], given["attention_mask"])
        (loss * scale).backward()
    assert not any(IS_READ in reason for reason in handle.tally.left)
    for _ in range(3):
        model(**given)
    assert handle.tally.batches > 0


@pytest.mark.parametrize("kind", ["the mean over all columns", "the mean over tokens"])
def test_compiled_models(kind):
    stock, model = twins(backbone())
    given = batch(model)
    handle = autopack.enable(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        reads = {**READERS, **OTHERS}[kind]
        assert step(compiled, given, reads) == pytest.approx(step(stock, given, reads), rel=EXACT)
    assert handle.tally.batches == int(kind in OTHERS)
    torch.compiler.reset()


def test_functional_gradients_keep_the_padding():
    """No gradient of theirs can be looked at."""
    stock, model = twins(backbone())
    given = batch(model)
    handle = autopack.enable(model)
    parameters = dict(model.named_parameters())

    def loss(which: Any, values: Any) -> torch.Tensor:
        return torch.func.functional_call(which, values, kwargs=given)[0].mean(1).square().sum()

    for _ in range(2):
        found, wanted = (torch.func.grad(lambda values, w=w: loss(w, values))(parameters) for w in (model, stock))
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    assert handle.tally.batches == 0


def test_a_copy_knows_what_its_model_knew():
    model = backbone()
    given = batch(model)
    autopack.enable(model)
    step(model, given, READERS["the last column"])
    clone = copy.deepcopy(model)
    handle = autopack.enable(clone)
    step(clone, given, READERS["the last column"])
    assert any(IS_READ in reason for reason in handle.tally.left)


def test_an_audit_does_not_ask_and_does_not_count():
    model = backbone()
    handle = autopack.enable(model)
    report = autopack.audit(model, modes=("right-padded", "right-padded, no labels"))
    assert report.exact
    assert all(result.unpadded for result in report.results)
    assert handle.enabled.padding_read.looks == 0
    model(**batch(model))
    assert any(FOUND_OUT in reason for reason in handle.tally.left)

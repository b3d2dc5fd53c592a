"""Steps of eight simulated ranks (`benchmarks.paper_ranks`) hold the same documents, and train as
padding does."""

import argparse

import pytest

from autopack.packing.strategies import CostModel
from benchmarks import paper_ranks
from benchmarks.paper_arms import Corpus, Shape
from benchmarks.paper_ranks import ARMS, MINI_BATCH, OFFLINE, PADDING, RANKS, REGROUPED
from tests.packing.batches import documents_in

OPTIONS = argparse.Namespace(
    batch_size=2,
    max_length=64,
    scale=32,
    seed=0,
    documents=64,
    warm=0,
    model="tiny",
    device="cpu",
    dtype="float64",
)


@pytest.fixture(scope="module")
def corpus():
    return Corpus.of("flan", OPTIONS)


def _documents(step):
    return sorted(tuple(each) for rank in step for call in rank for each in documents_in(call))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_step_holds_the_documents_of_padding_in_rows_that_are_not_too_long(
    corpus, accumulation
):
    shape = Shape.of(OPTIONS)
    steps = {
        arm: paper_ranks.steps_of(arm, corpus, shape, accumulation, CostModel()) for arm in ARMS
    }
    held = {arm: [_documents(step) for step in of] for arm, of in steps.items()}
    assert len(held[PADDING]) == OPTIONS.documents // (RANKS * OPTIONS.batch_size * accumulation)
    assert held[REGROUPED] == held[MINI_BATCH] == held[PADDING]
    assert all(len(step) == RANKS for of in steps.values() for step in of)
    for arm in (REGROUPED, OFFLINE):
        calls = [call for step in steps[arm] for rank in step for call in rank]
        assert max(call["input_ids"].numel() for call in calls) <= OPTIONS.max_length


def test_regrouped_steps_have_the_losses_of_padding(corpus):
    found = paper_ranks.measured(corpus, 1, OPTIONS)
    assert found[REGROUPED]["steps"] == found[PADDING]["steps"] > 2
    assert paper_ranks.difference(found, REGROUPED) <= 1e-6  # losses are taken in float32
    assert paper_ranks.difference(found, MINI_BATCH) <= 1e-6


def test_a_row_that_is_left_out_shows(corpus):
    shape = Shape.of(OPTIONS)
    step, *_ = paper_ranks.steps_of(REGROUPED, corpus, shape, 2, CostModel())
    trained = [paper_ranks.Trained(REGROUPED, OPTIONS) for _ in range(2)]
    trained[0].step(step)
    trained[1].step([*step[:-1], []])
    assert abs(trained[0].losses[0] - trained[1].losses[0]) > 1e-3

"""Epochs of the sampler: all of the same length, and no document repeated or left out without a word."""

import json
import logging
from itertools import chain, islice

import numpy as np
import pytest

from autopack import PackedBatchSampler, PackingCollator
from autopack.packing import plan
from tests.packing.batches import Documents

LENGTHS = np.random.default_rng(0).integers(1, 30, size=600)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_epochs_have_as_many_batches(ranks):
    sampler = PackedBatchSampler(LENGTHS, 64, num_replicas=ranks, rank=0)
    steps = len(sampler)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == steps
    assert len(sampler.plan) == len(plan(LENGTHS, 64, ranks=ranks))


def test_documents_that_are_left_out_are_told_once(caplog):
    with caplog.at_level(logging.WARNING, logger="autopack"):
        sampler = PackedBatchSampler([3, 90, 5, 70], 64, overflow="drop", num_replicas=1, rank=0)
        sampler.set_epoch(1)
    assert [r.getMessage() for r in caplog.records] == ["2 documents of 4 are longer than 64 tokens and are left out"]
    assert sorted(chain.from_iterable(sampler)) == [0, 2]


def test_options_of_numpy_make_the_state_of_those_of_python():
    options = {"rows_per_batch": 2, "seed": 3, "max_documents": 4, "num_replicas": 2, "rank": 1}
    of_numpy = {name: np.int32(value) for name, value in options.items()}
    plain = PackedBatchSampler(LENGTHS, 64, **options)
    other = PackedBatchSampler(LENGTHS, np.int64(64), **of_numpy)
    plain.set_epoch(2)
    other.set_epoch(np.int64(2))
    state = json.loads(json.dumps(other.state_dict(step=np.int64(1))))
    assert state == plain.state_dict(step=1)
    other.load_state_dict({**state, "step": np.int64(1)})
    json.dumps(other.state_dict())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["best_fit", "sequential"])
@pytest.mark.parametrize(("workers", "stops"), [(0, range(13)), (2, (0, 1, 5, 12))])
def test_a_loader_that_keeps_states_goes_on_after_every_step_of_a_later_epoch(workers, stops, strategy):
    """torchdata's StatefulDataLoader saves and loads the sampler's state by itself."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    lengths = [1 + 7 * n % 19 for n in range(60)]

    def loader(epoch, rank):
        sampler = PackedBatchSampler(lengths, 24, strategy=strategy, num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        options = {"batch_sampler": sampler, "collate_fn": PackingCollator(), "num_workers": workers}
        return stateful.StatefulDataLoader(Documents(lengths), **options)

    def tokens(batches):
        return [batch["input_ids"].tolist() for batch in batches]

    for rank in range(2):
        whole = tokens(loader(1, rank))
        assert len(whole) > max(stops)
        for stop in stops:
            first, again = loader(1, rank), loader(0, rank)
            seen = tokens(islice(first, stop)) if stop else []
            again.load_state_dict(first.state_dict())
            assert seen + tokens(again) == whole, stop

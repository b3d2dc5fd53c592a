"""Epochs of the sampler: all of the same length, and no document repeated or left out without a word."""

import json
import logging
from itertools import chain, islice

import numpy as np
import pytest

from autopack import PackedBatchSampler, PackingCollator
from autopack.packing import CostModel, plan
from tests.packing.batches import Documents

LENGTHS = np.random.default_rng(0).integers(1, 30, size=600)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["random", "best_fit"])
def test_all_epochs_have_as_many_batches_of_few_rows_more_than_one_plan(strategy, ranks):
    sampler = PackedBatchSampler(LENGTHS, 64, strategy=strategy, num_replicas=ranks, rank=0)
    steps = len(sampler)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == steps
    natural = [len(plan(LENGTHS, 64, strategy, seed=seed, ranks=ranks)) for seed in range(12)]
    assert len(sampler.plan) <= 1.03 * min(natural) + ranks
    assert (strategy, ranks) != ("random", 1) or len(set(natural)) > 1, "by themselves they differ in length"


def test_an_epoch_for_which_no_draw_is_short_enough_has_the_rows_of_the_first(monkeypatch):
    monkeypatch.setattr("autopack.packing.sampler._ATTEMPTS", 0)
    lengths = LENGTHS[:40]
    needed = [len(PackedBatchSampler(lengths, 64, strategy="random", seed=seed).plan) for seed in range(99)]
    seed = int(np.argmin(needed))
    sampler = PackedBatchSampler(lengths, 64, strategy="random", seed=seed, cost=None)
    first, of_epochs = sampler.plan, []
    for epoch in range(1, 30):
        sampler.set_epoch(epoch)
        assert len(sampler.plan) == len(first)
        assert sorted(chain.from_iterable(sampler)) == list(range(len(lengths)))
        of_epochs.append((sampler.plan == first, [*sampler] == [*map(list, first)]))
    assert (True, False) in of_epochs
    assert (False, False) in of_epochs


def test_documents_that_are_left_out_are_told_once(caplog):
    with caplog.at_level(logging.WARNING, logger="autopack"):
        sampler = PackedBatchSampler([3, 90, 5, 70], 64, overflow="drop", num_replicas=1, rank=0)
        sampler.set_epoch(1)
    assert [r.getMessage() for r in caplog.records] == ["2 documents of 4 are longer than 64 tokens and are left out"]
    assert sorted(chain.from_iterable(sampler)) == [0, 2]


# `plan(rows=...)`: so many rows and no others.


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("cost", [None, CostModel()])
@pytest.mark.parametrize("strategy", ["best_fit", "random"])
def test_rows_are_divided(strategy, cost, ranks):
    least = len(plan(LENGTHS, 64, strategy, ranks=ranks))
    for more in (0, 1, 3, 7, 40, (len(LENGTHS) - least) // ranks):
        made = plan(LENGTHS, 64, strategy, ranks=ranks, cost=cost, rows=least + more * ranks)
        assert len(made) == least + more * ranks
        assert sorted(made.documents) == list(range(len(LENGTHS)))
        assert (made.tokens_per_row <= 64).all()
        assert (np.diff(made.bounds) > 0).all()


def test_options_of_numpy_make_the_state_of_those_of_python():
    options = {"rows_per_batch": 2, "seed": 3, "max_documents": 4, "num_replicas": 2, "rank": 1, "align": 2}
    of_numpy = {name: np.int32(value) for name, value in options.items()}
    plain = PackedBatchSampler(LENGTHS, 64, drop_last=True, **options)
    other = PackedBatchSampler(LENGTHS, np.int64(64), drop_last=np.True_, **of_numpy)
    plain.set_epoch(2)
    other.set_epoch(np.int64(2))
    state = json.loads(json.dumps(other.state_dict(step=np.int64(1))))
    assert state == plain.state_dict(step=1)
    other.load_state_dict({**state, "step": np.int64(1)})
    json.dumps(other.state_dict())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["best_fit", "random", "sequential"])
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

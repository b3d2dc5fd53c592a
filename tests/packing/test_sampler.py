"""The sampler: every document once over all ranks, as many steps on each, the same after a stop, by
any launcher."""

import json
import logging
from itertools import chain, islice

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from autopack import PackedBatchSampler, PackingCollator
from autopack.packing import CostModel
from tests.packing.batches import Documents
from tests.support.refusals import refused

STRATEGIES = ("best_fit", "sequential")
LENGTHS = np.random.default_rng(0).integers(1, 30, 150)


def samplers(ranks, lengths=LENGTHS, max_length=30, **options):
    return [
        PackedBatchSampler(lengths, max_length, num_replicas=ranks, rank=r, **options)
        for r in range(ranks)
    ]


def in_steps(batches_of_ranks):
    """All batches, step by step."""
    return list(chain.from_iterable(zip(*batches_of_ranks, strict=True)))


def tokens_per_row(lengths, batch, max_length):
    """What the collator makes of a batch."""
    examples = [{"input_ids": [1] * int(lengths[i])} for i in batch]
    made = PackingCollator(max_length=max_length)(examples, "np")
    mask = made.get("attention_mask", np.ones_like(made["input_ids"]))
    return mask.sum(axis=1).tolist()


# What every epoch keeps


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["auto", CostModel(0, 1), None]),
)
def test_every_epoch_has_every_document_once_over_all_ranks_which_are_in_step(
    strategy, lengths, ranks, rows, cost
):
    """Few documents, too, which may be too few for the last step."""
    options = {"rows_per_batch": rows, "strategy": strategy, "seed": 3}
    if strategy != "sequential":
        options["cost"] = cost
    of_ranks = samplers(ranks, lengths, 20, **options)
    steps = len(of_ranks[0])
    for epoch in range(3):
        for sampler in of_ranks:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in of_ranks]
        assert {len(b) for b in batches} == {len(s) for s in of_ranks} == {steps}, (
            "as many steps on every rank"
        )
        assert set(chain(*of_ranks[0].plan)) == set(range(len(lengths)))
        every = list(chain(*in_steps(batches)))
        repeated = of_ranks[0].repeated
        assert len(every) == len(lengths) + repeated
        assert len(set(every)) == len(lengths)
        for batch in in_steps(batches):
            found = tokens_per_row(lengths, batch, 20)
            assert len(found) <= rows
            assert max(found) <= 20
        if strategy == "sequential" and not repeated:
            assert every == sorted(every)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_differ_and_come_again_whenever_they_are_drawn(strategy):
    first, second = (PackedBatchSampler(LENGTHS, 30, strategy=strategy, seed=1) for _ in range(2))
    epochs = []
    for epoch in (0, 1, 2):
        first.set_epoch(epoch)
        epochs.append(list(first))
        assert list(first) == epochs[-1], "without set_epoch the same again"
    for epoch in (2, 0, 1):
        second.set_epoch(epoch)
        assert list(second) == epochs[epoch]
    kept = strategy == "sequential"
    assert (epochs[0] == epochs[1]) == (epochs[1] == epochs[2]) == kept
    other = list(PackedBatchSampler(LENGTHS, 30, strategy=strategy, seed=2))
    assert (other == epochs[0]) == (strategy == "sequential")


# Too few documents


def test_rows_are_repeated_only_where_nothing_can_be_divided(caplog):
    with caplog.at_level(logging.WARNING, logger="autopack"):
        of_ranks = samplers(4, [9, 9, 9, 9, 9, 9], 10)
    every = [i for s in of_ranks for batch in s for i in batch]
    assert (len(every), set(every), of_ranks[0].repeated) == (8, set(range(6)), 2)
    assert "the last step repeats 2 documents" in caplog.text
    assert sum(len(b) for s in samplers(4, [9, 9, 9, 9, 9, 1, 1, 1, 1], 10) for b in s) == 9
    assert [len(list(s)) for s in samplers(4, [3], 10)] == [1, 1, 1, 1]
    assert "repeats 3 documents" in caplog.text


# Stop and go on


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=30)
@given(st.data())
def test_resume_equals_uninterrupted(strategy, data):
    """A state is one of JSON, and options may be numbers of numpy."""
    ranks, rows, epoch = (
        np.int64(data.draw(st.integers(*bounds))) for bounds in ((1, 3), (1, 3), (0, 2))
    )
    options = {"max_length": np.int32(30), "seed": np.int64(3), "max_documents": np.int64(9)}
    options |= {"rows_per_batch": rows, "strategy": strategy}
    for whole, stopped, resumed in zip(
        *(samplers(ranks, **options) for _ in range(3)), strict=True
    ):
        for sampler in (whole, stopped):
            sampler.set_epoch(epoch)
        batches = list(whole)
        step = data.draw(st.integers(0, len(batches)))
        assert list(islice(stopped, step)) == batches[:step]
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed.load_state_dict(state)
        assert (resumed.epoch, len(resumed)) == (epoch, len(batches))
        resumed.set_epoch(epoch)
        assert resumed.state_dict() == state
        assert list(resumed) == batches[step:]
        assert list(resumed) == batches, "the pass after that is whole"
        resumed.set_epoch(epoch + 1)
        whole.set_epoch(epoch + 1)
        assert list(resumed) == list(whole)


GROUPS = {"groups": np.arange(150) % 9, "max_length": 90}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({}, {"lengths": LENGTHS[::-1]}, "lengths"),
        ({}, {"num_replicas": 3}, "'num_replicas': 2.*'num_replicas': 3"),
        ({}, {"strategy": "sequential"}, "'best_fit'.*'sequential'"),
        ({}, {"cost": None}, "'cost': None"),
        (GROUPS | {"prefixes": [1] * 150}, GROUPS | {"prefixes": [0] * 150}, ""),
    ],
)
def test_the_state_of_another_sampler_is_refused(one, other, message):
    usual = {"lengths": LENGTHS, "max_length": 64, "num_replicas": 2, "rank": 1}
    state = PackedBatchSampler(**usual | one).state_dict()
    PackedBatchSampler(**usual | one | {"rank": 0}).load_state_dict(state)
    with refused("other-data", match=f"the state is of another sampler, .*{message}"):
        PackedBatchSampler(**usual | other).load_state_dict(state)
    with refused("other-data"):
        PackedBatchSampler(**usual | one).load_state_dict({**state, "step": 999})
    state["made_of"].pop("rows")
    with refused("other-data"):
        PackedBatchSampler(**usual | one).load_state_dict(state)


def test_leaving_a_loaded_state_is_said(caplog):
    sampler = PackedBatchSampler(LENGTHS, 30)
    sampler.set_epoch(2)
    state = sampler.state_dict(step=5)
    other = PackedBatchSampler(LENGTHS, 30)
    other.load_state_dict(state)
    with caplog.at_level(logging.WARNING, logger="autopack"):
        other.set_epoch(0)
    assert "leaves the loaded state (epoch 2, step 5)" in caplog.text


# Loaders and launchers


def seen(loader):
    """First tokens of the documents of each batch: `Documents` begins each with its own index."""
    return [[int(d["input_ids"][0]) for d in batch] for batch in loader]


def loader_of(sampler):
    return DataLoader(Documents(LENGTHS), batch_sampler=sampler, collate_fn=list)


def prepared(sampler, ranks, rank):
    return prepare_data_loader(loader_of(sampler), num_processes=ranks, process_index=rank)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 4, 1])
def test_accelerate_gives_each_process_its_own_batches_and_goes_on_in_a_later_epoch(
    ranks, strategy, rows
):
    """A trainer that resumes makes a loader anew, skips, and says which epoch it is: behind two
    wrappers."""
    options = {"strategy": strategy, "rows_per_batch": rows}
    for rank in range(ranks):
        sampler, alone = (samplers(ranks, **options)[rank] for _ in range(2))
        loader = prepared(sampler, ranks, rank)
        assert len(loader) == len(sampler) == len(alone), (
            "asked by anyone else it speaks of its own rank"
        )
        assert seen(loader) == list(sampler) == list(alone)
        for epoch in (0, 2):
            loader.set_epoch(epoch)
            alone.set_epoch(epoch)
            batches = list(alone)
            for step in range(len(batches)):
                skipping = prepared(samplers(ranks, **options)[rank], ranks, rank)
                skipping = skip_first_batches(skipping, step) if step else skipping
                skipping.set_epoch(epoch)
                assert seen(skipping) == batches[step:]
        resumed = samplers(ranks, **options)[rank]
        resumed.load_state_dict(sampler.state_dict(step=2))
        loader = prepared(resumed, ranks, rank)
        loader.set_epoch(2)
        assert seen(loader) == batches[2:]


def test_accelerate_that_skips_before_it_shares_out_is_seen_through():
    sampler = samplers(2)[1]
    # a step of both ranks, as accelerate counts here
    skipped = skip_first_batches(loader_of(sampler), 2)
    prepared = prepare_data_loader(skipped, num_processes=2, process_index=1)
    assert seen(prepared) == list(samplers(2)[1])[1:]


def test_accelerate_with_another_number_of_processes_is_refused():
    with refused("accelerate-batches"):
        next(iter(prepared(samplers(3)[0], 2, 0)))


def test_accelerate_that_cuts_batches_up_is_refused():
    one, two = (
        prepare_data_loader(
            DataLoader(
                Documents(LENGTHS), batch_sampler=samplers(ranks)[0], collate_fn=PackingCollator()
            ),
            dispatch_batches=True,
            put_on_device=True,
        )
        for ranks in (1, 2)
    )
    with refused("accelerate-batches"):
        next(iter(two))
    assert sum(b["input_ids"].numel() for b in one) == LENGTHS.sum()


def test_ranks_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="WORLD_SIZE=3 is set and RANK is not"):
        PackedBatchSampler(LENGTHS, 30)
    monkeypatch.setenv("RANK", "2")
    sampler = PackedBatchSampler(LENGTHS, 30)
    assert (sampler.num_replicas, sampler.rank) == (3, 2)
    assert list(sampler) == list(samplers(3)[2])
    assert PackedBatchSampler(LENGTHS, 30, num_replicas=1, rank=0).num_replicas == 1
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="wanted ints"):
        PackedBatchSampler(LENGTHS, 30)


def test_ranks_from_torch_distributed(monkeypatch):
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("RANK", "6")
    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=fake.FakeStore())
    try:
        sampler = PackedBatchSampler(LENGTHS, 30)
    finally:
        torch.distributed.destroy_process_group()
    assert (sampler.num_replicas, sampler.rank) == (4, 1)


def test_documents_that_are_left_out_are_told_once(caplog):
    with caplog.at_level(logging.WARNING, logger="autopack"):
        sampler = PackedBatchSampler([3, 90, 5, 70], 64, overflow="drop", num_replicas=1, rank=0)
        sampler.set_epoch(1)
    assert [r.getMessage() for r in caplog.records] == [
        "2 documents of 4 are longer than 64 tokens and are left out"
    ]
    assert sorted(chain.from_iterable(sampler)) == [0, 2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("workers", "stops"), [(0, range(13)), (2, (0, 1, 5, 12))])
def test_a_loader_that_keeps_states_goes_on_after_every_step_of_a_later_epoch(
    workers, stops, strategy
):
    """torchdata's StatefulDataLoader saves and loads the sampler's state by itself."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    lengths = [1 + 7 * n % 19 for n in range(60)]

    def loader(epoch, rank):
        sampler = PackedBatchSampler(lengths, 24, strategy=strategy, num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        options = {
            "batch_sampler": sampler,
            "collate_fn": PackingCollator(),
            "num_workers": workers,
        }
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

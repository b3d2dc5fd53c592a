"""torchdata's StatefulDataLoader over the sampler: it saves and loads the sampler's state by itself."""

from __future__ import annotations

from itertools import islice

import pytest

from autopack import PackedBatchSampler, PackingCollator
from tests.packing.batches import Documents

stateful = pytest.importorskip("torchdata.stateful_dataloader")
LENGTHS = [1 + 7 * n % 19 for n in range(60)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["best_fit", "random", "sequential"])
@pytest.mark.parametrize(("workers", "stops"), [(0, range(13)), (2, (0, 1, 5, 12))])
def test_it_goes_on_after_every_step_of_a_later_epoch(workers, stops, strategy):
    def loader(epoch, rank):
        sampler = PackedBatchSampler(LENGTHS, 24, strategy=strategy, num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        options = {"batch_sampler": sampler, "collate_fn": PackingCollator(), "num_workers": workers}
        return stateful.StatefulDataLoader(Documents(LENGTHS), **options)

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

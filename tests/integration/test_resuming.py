"""Trainers on two processes: resuming in a later epoch, and streams whose processes get unequally many rows."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import torch

from tests.integration import resuming

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return resuming.run(tmp_path_factory.mktemp("ranks"))


def test_every_document_is_seen_once_in_each_epoch(results):
    seen = Counter(chain.from_iterable(chain.from_iterable((*rank["first"], *rank["second"]) for rank in results)))
    assert len(seen) == resuming.DOCUMENTS
    assert set(seen.values()) == {2}


def test_each_rank_goes_on_where_it_was(results):
    for rank in results:
        assert rank["first"] + rank["second"] == rank["whole"]
        assert rank["second"]


def test_parameters_are_those_of_a_run_without_a_stop(results):
    assert all(rank["error"] == 0.0 for rank in results)


def test_processes_of_a_stream_train_as_many_steps_although_their_epochs_differ(results):
    first, second = (rank["stream"] for rank in results)
    assert len(first["seen"]) == len(second["seen"]) == 40
    assert first["epoch"] != second["epoch"]
    seen = Counter(chain.from_iterable((*first["seen"], *second["seen"])))
    assert set(seen) == set(range(103))


def test_an_endless_stream_is_resumed_after_it_has_begun_again(results):
    """Trainer takes all steps of a stream for its first epoch, so a stream that ends is resumed elsewhere."""
    for rank in results:
        if "endless" not in rank:
            pytest.skip("this release of datasets does not repeat streams")
        whole, first, second = rank["endless"]
        assert len(whole) == 40
        assert first + second == whole
        again = Counter(chain.from_iterable(whole))
        assert max(again.values()) > 1, "the stream has not begun again"

"""Resuming in a later epoch on two processes: every document once, and the parameters of a run without a stop."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch

from tests.integration import resuming

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
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

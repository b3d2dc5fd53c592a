"""Data parallelism on two processes: DDP, FSDP (which runs on the CPU with gloo) and accelerate around them."""

from __future__ import annotations

import pytest
import torch

from tests.integration import ranks
from tests.integration.documents import FLOAT32, LEAK

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")

LEAKING = [name for name in ranks.CASES if name.endswith("enabled never")]
EXACT = [name for name in ranks.CASES if name not in LEAKING]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All cases share one pair of processes: starting them costs more than all the cases."""
    return ranks.run(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", EXACT)
def test_gradients_on_both_ranks_are_those_of_the_documents_alone(case, results):
    for rank in results:
        assert isinstance(rank[case], float), rank[case]
        assert rank[case] < FLOAT32


@pytest.mark.parametrize("case", LEAKING)
def test_without_autopack_they_are_not(case, results):
    assert max(rank[case] for rank in results) > LEAK

"""A model that is shared out over processes is proven without its weights and without the other processes."""

from __future__ import annotations

import pytest
import torch

if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)
from tests.conftest import FLOAT32
from tests.integration import processes, proofs

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.run(proofs.all_cases, tmp_path_factory.mktemp("ranks"), proofs.WORLD)


@pytest.mark.parametrize("name", proofs.WRAPS)
def test_one_rank_alone_proves_by_a_twin(name, results):
    for rank in results:
        source, worst, collectives = rank[name]
        assert source == "twin"
        assert worst < FLOAT32
        # The control of the count: the call itself makes ranks wait for each other.
        assert collectives > 0 or name == "DDP"


def test_a_layer_of_ones_own_is_no_reason_to_run_the_model(results):
    assert [rank["own layer"] for rank in results] == ["part"] * proofs.WORLD


def test_a_run_of_the_model_is_seen(results):
    for rank in results:
        assert rank["control"].startswith("modules ran") or "collectives" in rank["control"], rank["control"]

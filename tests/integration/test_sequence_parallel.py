"""Rows that several ranks share: `enable(model, sequence_parallel=group)` and `shard_rows`."""

from __future__ import annotations

import pytest
import torch

from tests.integration import processes, shared_rows
from tests.integration.documents import FLOAT32, LEAK

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return processes.run(shared_rows.all_findings, tmp_path_factory.mktemp("ranks"))


def test_shared_rows_are_exact(findings):
    exact = {name: max(rank[name] for rank in findings) for name in findings[0] if name.startswith("exact ")}
    assert len(exact) >= len(shared_rows.KINDS) + 8
    assert {name: error for name, error in exact.items() if error >= FLOAT32} == {}


@pytest.mark.parametrize("order", ["before", "after", "windows"])
def test_rows_that_deepspeed_shares_out_are_exact(order, findings):
    """Its attention is a stand-in here, after its source; it is registered before or after the model is enabled."""
    for rank in findings:
        assert rank[f"deepspeed {order}"]["error"] < FLOAT32
        assert rank[f"deepspeed {order}"]["restored"]


def test_they_leak_without_autopack(findings):
    assert all(rank["deepspeed stock"]["error"] > LEAK for rank in findings)


def test_no_document_moves_with_another(findings):
    assert [rank["perturbed"] for rank in findings] == [0.0, 0.0]


@pytest.mark.parametrize("name", [name for name, (_, words) in shared_rows.REFUSED.items() if words])
def test_what_is_not_exact_is_refused_on_every_rank(name, findings):
    _, words = shared_rows.REFUSED[name]
    for rank in findings:
        assert words in rank[f"refused {name}"]


def test_no_rank_waits_for_one_that_refuses(findings):
    first, second = (rank["refused one rank"] for rank in findings)
    assert "rank 1 of those that share them refused" in first
    assert second.startswith("InvalidPacking: use_cache=True")


def test_calls_of_shared_rows_are_checked(findings):
    assert all(tuple(rank["watched"]) == (1, {}) for rank in findings)


def _four(rank, _):
    return {
        "llama": shared_rows.error("llama", num_key_value_heads=4),
        "columns to add": shared_rows.error("llama", shared_rows.declared_otherwise, num_key_value_heads=4),
    }


@pytest.mark.exhaustive
def test_four_ranks(tmp_path):
    for rank in processes.run(_four, tmp_path, world=4):
        assert {name: error for name, error in rank.items() if error >= FLOAT32} == {}

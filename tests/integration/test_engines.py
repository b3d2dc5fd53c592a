"""Ranks that gather parameters together, with unequal numbers of documents; `python -m compat.engines` runs all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch.distributed.tensor.experimental")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)
from compat.engines import cells, start
from compat.engines.__main__ import GOOD
from tests.integration import in_step, processes

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]

SAMPLE = {"fsdp2/xlnet": "exact", f"fsdp2/{cells.HEAD}": "refused"}
RECORDED = Path(__file__).parents[2] / "compat" / "results" / "engines.json"


def test_a_sample_of_engines():
    """Started by torchrun; three steps with a checkpoint between them, each with other documents per rank."""
    found = dict(start.run(tuple(SAMPLE)))
    assert {cell: verdict["status"] for cell, verdict in found.items()} == SAMPLE, found


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return processes.run(in_step.all_findings, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", in_step.CASES)
def test_every_rank_has_what_documents_alone_have_or_is_refused(name, findings):
    _, wanted = in_step.CASES[name]
    for rank in findings:
        found = rank[name]
        if isinstance(wanted, float):
            assert isinstance(found, float), found
            assert found < wanted
        else:
            assert found == wanted if isinstance(wanted, list) else wanted in found, found


def test_without_idle_runs_ranks_wait_for_each_other(findings):
    """The control: what ends the wait is the timeout of their group."""
    errors = [rank["without idle runs"] for rank in findings]
    assert any("Timed out" in error for error in errors), errors


def test_every_engine_has_been_recorded():
    recorded = json.loads(RECORDED.read_text())["cells"]
    wanted = {f"{e}/{t}" for e in cells.ENGINE_NAMES for t in cells.types_of(e)}
    assert set(recorded) == wanted
    assert {verdict["status"] for verdict in recorded.values()} <= set(GOOD)

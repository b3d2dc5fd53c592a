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
from tests.encoder_decoder.pairs import GRADIENTS
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


@pytest.mark.parametrize("name", ["evaluated", "tuple", "padded beside packed", "hook on one rank"])
def test_results_are_those_of_documents_alone(name, findings):
    assert all(rank[name] < 1e-5 for rank in findings)


@pytest.mark.parametrize("name", ["a whole encoder", "a whole decoder"])
def test_gradients_of_halves_are_those_of_documents_alone(name, findings):
    assert all(rank[name] < GRADIENTS for rank in findings)


def test_an_idle_run_leaves_nothing_behind(findings):
    assert [rank["left behind"] for rank in findings] == [[], []]


def test_what_cannot_be_run_again_is_refused_on_every_rank(findings):
    assert all(rank["cache"].startswith("UnsupportedModel") for rank in findings)
    assert "use_cache=False" in findings[1]["cache"]
    assert all("Pass it padded batches" in rank["a head that runs documents alone"] for rank in findings), findings


@pytest.mark.parametrize("name", ["context_parallel", "attention across ranks", "attention across ranks, further in"])
def test_parts_of_rows_are_refused(name, findings):
    assert all(rank[name].startswith("UnsupportedModel") for rank in findings), findings
    assert all("holds a part of every row" in rank[name] for rank in findings), findings


def test_without_idle_runs_ranks_wait_for_each_other(findings):
    """The control: what ends the wait is the timeout of their group."""
    errors = [rank["without idle runs"] for rank in findings]
    assert any("Timed out" in error for error in errors), errors


def test_every_engine_has_been_recorded():
    recorded = json.loads(RECORDED.read_text())["cells"]
    wanted = {f"{e}/{t}" for e in cells.ENGINE_NAMES for t in cells.types_of(e)}
    assert set(recorded) == wanted
    assert {verdict["status"] for verdict in recorded.values()} <= set(GOOD)

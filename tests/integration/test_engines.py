"""Ranks that gather parameters together, with unequal numbers of documents; `python -m
compat.engines` runs all."""

import pytest
import torch

pytest.importorskip("torch.distributed.tensor.experimental")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)
from compat.engines import cells, start
from compat.engines.__main__ import STUDY

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]

SAMPLE = {
    "fsdp2/xlnet": "exact",
    f"fsdp2/{cells.HEAD}": "refused",
    "fsdp2 bfloat16/llama": "exact",
    "shared rows fsdp2/llama": "exact",
}


def test_a_sample_of_engines():
    """Started by torchrun; three steps with a checkpoint between them, each with other documents
    per rank."""
    found = dict(start.run(tuple(SAMPLE)))
    assert {cell: verdict["status"] for cell, verdict in found.items()} == SAMPLE, found


def test_every_engine_has_been_recorded():
    assert STUDY.stale() == []

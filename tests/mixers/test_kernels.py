"""Kernels of real signatures, computed on the CPU: the bounds of documents arrive, or nothing is
fed without them."""

import json
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from autopack import registry, tiny
from autopack.mixers import AtOperations
from tests.conftest import FLOAT32

KERNELS = {
    "mamba_selective_scan": "selective_scan_fn",
    "mamba2_chunk_scan": "mamba_split_conv1d_scan_combined",
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention": "chunk_kda",
}
"""What computes the scan in training, where all kernels are installed."""
BLIND = {"selective_scan_fn", "mamba_inner_fn"}
"""Kernels that cannot be told of documents."""
SCANS = {
    name: [KERNELS[operation] for operation in way.operations if operation in KERNELS]
    for family in registry.families()
    for name, way in family.mixers.items()
    if isinstance(way, AtOperations)
}
"""For each class of mixers, its scan."""
TYPES = sorted(
    model_type
    for family in registry.families()
    if any(isinstance(way, AtOperations) for way in family.mixers.values())
    for model_type in family.model_types & set(tiny.types_for("causal-lm"))
)
WITHOUT_KERNELS = {"lfm3", "zaya"}
"""Types for whose convolutions transformers asks for no kernel."""
INSIDE_ATTENTION = {"inkling_text"}
"""Types with convolutions in attention that runs on documents alone, which are told no bounds."""


@cache
def measured(*options):
    command = [sys.executable, "-m", "compat.scans", *options, "--types", *TYPES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {found["type"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("model_type", TYPES)
def test_bounds_arrive_in_every_layer(model_type):
    found = measured()[model_type]
    assert found["logits"] < FLOAT32
    assert found["gradients"] < 10 * FLOAT32
    scans = Counter(scan for name in found["mixers"] for scan in SCANS.get(name, []))
    told = {name for name, bounds in found["calls"] if bounds is not None}
    alone = [None] if model_type in INSIDE_ATTENTION else []
    assert all(
        bounds in [found["documents"], *alone]
        for name, bounds in found["calls"]
        if name not in BLIND
    )
    if model_type in WITHOUT_KERNELS:
        assert not found["calls"]
    elif not scans:
        assert told == {"causal_conv1d_fn"}
    calls = Counter(name for name, _ in found["calls"])
    # Its norms of B, C and the time step are others than the model's: a document alone is trained
    # on them.
    assert ("mamba_inner_fn" in calls) == (model_type == "falcon_mamba")
    for scan, layers in scans.items():
        assert calls[scan] >= layers if scan in BLIND else calls[scan] == layers
        assert scan in told or scan in BLIND


@pytest.mark.parametrize("model_type", TYPES)
def test_kernels_that_cannot_be_told_are_fed_one_document_per_row(model_type):
    found = measured("--without-bounds")[model_type]
    assert found["logits"] < FLOAT32
    assert found["gradients"] < 10 * FLOAT32
    assert not any("split" in name or bounds for name, bounds in found["calls"])
    assert bool(found["calls"]) == (model_type not in WITHOUT_KERNELS)

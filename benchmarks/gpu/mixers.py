"""Recurrent and convolutional types on the device: with kernels of fla and others where they are installed."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

import autopack
from autopack import registry, tiny
from autopack.inspection import releases
from autopack.mixers import AtOperations
from benchmarks.gpu.exactness import DTYPES
from benchmarks.gpu.job import Job

TYPES = ("qwen3_next", "olmo_hybrid", "kimi_linear", "mamba2", "falcon_mamba", "lfm2", "recurrent_gemma", "rwkv")
SMALL = ("qwen3_next",)
# Not 1 on a GPU: the backward of causal_conv1d refuses the strides of one token alone, in stock.
LENGTHS, SMALL_LENGTHS = (7, 130, 2, 62), (3, 9, 1, 5)
MODES = ("default", "two rows", "right-padded")
_OPERATIONS = sorted(
    {
        name
        for family in registry.families()
        for way in family.mixers.values()
        if isinstance(way, AtOperations)
        for name in way.operations
    }
)


def measure_mixers(job: Job) -> None:
    """Audit all types against themselves alone: their kernels take no float32 to refer to."""
    arrived = None
    if not job.machine.is_cuda:
        from compat.scans import install

        arrived = install()  # before any modeling file is imported
    dtypes = DTYPES if job.machine.is_cuda else {"fp32": torch.float32}

    def of(cell: str) -> dict[str, Any]:
        model_type, name = cell.split()
        return measure(model_type, dtypes[name], job)

    cells = [f"{model_type} {name}" for model_type in (SMALL if job.small else TYPES) for name in dtypes]
    job.measure(cells, of, modes=MODES, lengths=SMALL_LENGTHS if job.small else LENGTHS)
    if arrived is not None:
        job.record(**{"documents at kernels": arrived.calls[-4:]})


def measure(model_type: str, dtype: torch.dtype, job: Job) -> dict[str, Any]:
    """An audit of one enabled type, and which of its functions are kernels here."""
    model: Any = tiny.build(model_type, dtype=dtype, device=job.machine.device)
    routes = any("expert" in name for name, _ in model.named_modules())
    modeling = importlib.import_module(type(model).__module__)
    functions = {name: getattr(modeling, name) for name in _OPERATIONS if hasattr(modeling, name)}
    train = job.machine.is_cuda  # the stand-in of Mamba's fused kernel, which is for training, serves no document
    with autopack.enable(model, verify=False):
        lengths = SMALL_LENGTHS if job.small else LENGTHS
        report = autopack.audit(model, lengths=lengths, modes=MODES, training=(train,), gradients=not routes)
    found: dict[str, Any] = {
        "packed": report.worst,
        "gradient packed": report.worst_gradient,
        "influence": max((r.worst_influence for r in report.results if r.influence is not None), default=math.nan),
        "kernels": {name: bool(releases.kernel_parameters(function)) for name, function in functions.items()},
    }
    failures = [result.failure for result in report.results if result.failure is not None]
    if failures:
        return {**found, "inexact": failures[0]}
    if routes:
        found["judged"] = "by influence alone, because it routes tokens"
        wrong = not found["influence"] <= report.tolerance
        return {**found, "inexact": f"influence is {found['influence']:.1e}"} if wrong else found
    return found if report.exact else {**found, "inexact": report.worst_case}

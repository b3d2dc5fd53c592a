"""The parts of a run, in the order in which they are worth having when the time is short."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu.exactness import measure_backend
from benchmarks.gpu.job import Job, Part
from benchmarks.gpu.mixers import measure_mixers
from benchmarks.gpu.speed import SIZES, measure_size
from benchmarks.gpu.waits import count_waits


def environment(job: Job) -> dict[str, Any]:
    """What the run has, and what autopack finds of it."""
    from autopack.attention.choose import availability

    backends = {name: {"usable": usable, "why": why} for name, (usable, why) in availability().items()}
    if job.machine.is_cuda and not backends["varlen"]["usable"]:
        job.problem(f"the varlen backend is not available: {backends['varlen']['why']}")
    return {**job.machine.about(), "backends": backends}


PARTS = [
    Part("environment", environment, 0.1),
    Part("exactness, varlen", partial(measure_backend, backend="varlen"), 0.1),
    Part("exactness, flash", partial(measure_backend, backend="flash"), 0.1),
    Part("waits", count_waits, 0.08),
    *(
        Part(f"speed, {name}", partial(measure_size, name=name), share)
        for name, share in zip(SIZES, (0.07, 0.07, 0.1, 0.07, 0.14, 0.1), strict=True)
    ),
    Part("exactness, flex", partial(measure_backend, backend="flex"), 0.1),
    Part("mixers", measure_mixers, 0.13, apart=True),
]

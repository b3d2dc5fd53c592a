"""The parts of a run, in the order in which they are worth having when the time is short."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.job import Job, LeftOut, Part
from benchmarks.gpu.processes import run_bounded
from benchmarks.gpu.speed import SIZES, measure_size


def environment(job: Job) -> dict[str, Any]:
    """What the run has, and what autopack finds of it."""
    from autopack.attention.choose import availability

    backends = {
        name: {"usable": usable, "why": why} for name, (usable, why) in availability().items()
    }
    if job.machine.is_cuda and not backends["varlen"]["usable"]:
        job.problem(f"the varlen backend is not available: {backends['varlen']['why']}")
    return {**job.machine.about(), "backends": backends}


def run_program(job: Job, module: str, arguments: str, small: str | None) -> None:
    """Run another benchmark on the device in a process of its own, and record what it prints
    last."""
    given = small if job.small else arguments
    if given is None:
        raise LeftOut("not among the tiny sizes")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            module,
            "--device",
            job.machine.device,
            "--json",
            str(path),
        ]
        status, lines = run_bounded([*command, *given.split()], job.left())
        job.record(
            output=lines[-40:], record=json.loads(path.read_text()) if path.exists() else None
        )
    if status != 0:
        job.problem(f"{module} ended with status {status}")


TRIAL = "--model tiny --scale 16 --data flan --documents 12 --timed 8 --rounds 1"
PROGRAMS = {
    "live checks": (
        "benchmarks.checks",
        "--rounds 30 --steps 300",
        "--only Llama --rounds 2 --steps 4",
    ),
    "paper, 1B": (
        "benchmarks.paper",
        "--model 1b --dtype bfloat16 --data flan --documents 400",
        TRIAL,
    ),
    "paper, 7B": (
        "benchmarks.paper",
        "--model 7b --dtype bfloat16 --data flan --documents 96 --rounds 1",
        None,
    ),
}
PARTS = [
    Part("environment", environment, 0.1),
    *(
        Part(f"speed, {name}", partial(measure_size, name=name), share)
        for name, share in zip(
            SIZES, (0.07, 0.07, 0.1, 0.07, 0.14, 0.1, 0.1, 0.1, 0.1, 0.1), strict=True
        )
    ),
    *(
        Part(name, partial(run_program, module=module, arguments=arguments, small=small), 0.3)
        for name, (module, arguments, small) in PROGRAMS.items()
    ),
]

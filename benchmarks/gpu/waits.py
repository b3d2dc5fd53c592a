"""How often the host waits for the device in one call, by `torch.cuda.set_sync_debug_mode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack import tiny
from autopack.bench.contest import Batch
from benchmarks.gpu.arms import ARMS, calls, is_packed, on
from benchmarks.gpu.job import Job

LAYERS = (2, 6)


def count_waits(job: Job) -> None:
    """Count them for every arm, forward and with backward, in models of two depths: no layer of ours may wait."""
    found: dict[str, Any] = {}
    job.record(calls=found, layers=LAYERS)
    with job.machine.kernels_of("flash") as kernels:
        job.record(flash=kernels)
        for arm in ARMS:
            try:
                found[arm.name] = {kind: _of(job, arm, kind) for kind in ("forward", "forward and backward")}
            except Exception as error:
                found[arm.name] = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
                job.problem(f"{arm.name}: {found[arm.name]['error']}")
                continue
            if arm.enabled:
                for kind, by_depth in found[arm.name].items():
                    totals = [sum(lines.values()) for lines in by_depth.values()]
                    if len(set(totals)) > 1:
                        job.problem(f"{arm.name}, {kind}: {totals} waits with {LAYERS} layers")
                    if totals[0] > 1 and kind == "forward" and is_packed(arm):
                        job.problem(f"{arm.name}, {kind}: {totals[0]} waits, and one was to be enough")
            job.record()


def _of(job: Job, arm: Any, kind: str) -> dict[str, dict[str, int]]:
    found = {}
    for layers in LAYERS:
        device = job.machine.device
        model: Any = tiny.build(
            "llama", attn_implementation="sdpa", dtype=torch.bfloat16, device=device, num_hidden_layers=layers
        )
        batch = Batch.of([15, 25], torch.arange(1, model.config.vocab_size), job.seed, device)
        model.config.use_cache = False
        with on(model, arm):
            (call,) = calls(arm, model, [batch])
            run = _call(model, call, backward=kind != "forward")
            run()  # what a first call does is not what every call does
            found[f"{layers} layers"] = job.machine.waits(run)
    return found


def _call(model: Any, call: dict[str, Any], backward: bool) -> Callable[[], None]:
    def run() -> None:
        with torch.set_grad_enabled(backward):
            loss = model(**call).loss
            if backward:
                loss.backward()
                model.zero_grad()

    return run

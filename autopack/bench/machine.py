"""The machine that is timed on: what it is, how busy, how to wait for it, and the memory that a step takes."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any


def origin() -> dict[str, Any]:
    """Return the time, machine and versions; call it first, so that the load is not that of the benchmark."""
    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load at start": load(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def load() -> float | None:
    """Processes that wanted a core in the last minute, on average; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def wait_for(device: Any) -> None:
    """Wait until a device, as torch names it, has done all that it was given."""
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind != "cpu":
        getattr(torch, kind).synchronize()


def kept_by(model: Any, optimizer: Any, call: dict[str, Any]) -> Iterable[Any]:
    """The tensors that stay from step to step; `optimizer` may be None."""
    states = (value for state in optimizer.state.values() for value in state.values()) if optimizer is not None else ()
    return [v for v in (*model.parameters(), *model.buffers(), *states, *call.values()) if hasattr(v, "element_size")]


def peak_memory(step: Callable[[], Any], kept: Iterable[Any], device: str) -> int:
    """The most bytes that torch's allocator has handed out at a time during a step, tensors that stay included.

    CUDA counts them itself. On a CPU they are the bytes of `kept` and the highest sum of the allocations and releases
    that the profiler records; resident memory is more, by what Python, torch and the heap hold.
    """
    import torch

    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return int(torch.cuda.max_memory_allocated(device))
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    recorded = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(recorded, key=lambda e: e.start_ns())]
    return sum(each.numel() * each.element_size() for each in kept) + max(accumulate(changes, initial=0))

"""Run a function of the rank on several processes (gloo, CPU), and gather what it returns."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[int, Path], Any]
"""Takes the rank and a folder that all ranks share; returns what `torch.save` can write."""


def run(work: Work, folder: Path, world: int = 2, timeout: float = 600.0) -> list[Any]:
    """What `work`, a function of a module, returns on each rank; one that waits `timeout` seconds for others raises."""
    torch.multiprocessing.spawn(_rank, args=(work, folder, world, timeout), nprocs=world)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _rank(rank: int, work: Work, folder: Path, world: int, timeout: float) -> None:
    torch.set_num_threads(1)
    # accelerate reads these; the group itself meets in a file.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    meeting, patience = f"file://{folder}/meeting", datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=patience)
    torch.save(work(rank, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()

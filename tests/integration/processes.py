"""Run a function of the rank on several processes (gloo, CPU), and gather what it returns."""

import datetime
import os
import sys
import traceback
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist


def run(work, folder, world=2, timeout=600.0):
    """What `work` returns on each rank; one that waits `timeout` seconds for others raises.

    It is a function of a module, which takes the rank and a folder that all share, and returns what
    can be saved."""
    torch.multiprocessing.spawn(_rank, args=(work, folder, world, timeout), nprocs=world)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def found_by(module, folder):
    """What the cases of a module give on each rank, by their names: they are functions of the
    rank."""
    return run(partial(_found, module), folder)


def _found(module, rank, _):
    found = {}
    for name, (case, _) in import_module(module).CASES.items():
        dist.barrier()
        try:
            found[name] = case(rank)
        except Exception as error:
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _rank(rank, work, folder, world, timeout):
    torch.set_num_threads(1)
    # accelerate reads these; the group itself meets in a file.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    meeting, patience = f"file://{folder}/meeting", datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=patience
    )
    torch.save(work(rank, folder), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # After a Trainer of stock transformers gloo's threads may end a process by a signal, or never,
    # as Python ends.
    os._exit(0)

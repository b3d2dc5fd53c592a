"""Threads of this process that share packed rows as processes do, to see what a twin makes of its part of them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from autopack.runtime.row_group import RowGroup

_T = TypeVar("_T")
_PATIENCE = 60.0
"""Seconds after which a thread no longer waits for the others."""


class ThreadGroup(RowGroup):
    """The ranks as one of the threads sees them; `laid_out` is where they hand each other what they have."""

    of_processes = False

    def __init__(self, barrier: threading.Barrier, laid_out: list[Any], rank: int):
        super().__init__((barrier, rank))
        self.barrier, self._laid_out, self._rank = barrier, laid_out, rank

    def _of_all(self, value: Any) -> list[Any]:
        """What every rank has brought, in their order."""
        self._laid_out[self._rank] = value
        self.barrier.wait()
        found = list(self._laid_out)
        self.barrier.wait()
        return found

    @property
    def ranks(self) -> int:
        return len(self._laid_out)

    @property
    def rank(self) -> int:
        return self._rank

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._of_all(values))

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.stack([each[self._rank] for each in self._of_all(parts.detach())])


def ranks_of_threads(count: int) -> list[ThreadGroup]:
    """So many ranks that share rows."""
    barrier, laid_out = threading.Barrier(count, timeout=_PATIENCE), [None] * count
    return [ThreadGroup(barrier, laid_out, rank) for rank in range(count)]


def run_together(groups: list[ThreadGroup], function: Callable[[ThreadGroup], _T]) -> list[_T]:
    """What a function returns on each of some ranks, which run at the same time.

    Where one raises, the others no longer wait for it, and what it raised is raised here.
    """

    def on_one(group: ThreadGroup) -> _T:
        try:
            return function(group)
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(len(groups), thread_name_prefix="autopack") as pool:
        running = [pool.submit(contextvars.copy_context().run, on_one, group) for group in groups]
        errors = [error for each in running if (error := each.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [each.result() for each in running]

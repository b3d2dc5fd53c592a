"""Threads of this process that share packed rows as processes do, to test a twin on its part."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopack.runtime.row_group import RowGroup

_T = TypeVar("_T")
_DONE = object()
"""The value that a rank that has finished hands the others."""


class ThreadGroup(RowGroup):
    """One rank of a group of threads that share rows; `laid_out` holds exchanged values."""

    of_processes = False

    def __init__(self, barrier: threading.Barrier, laid_out: list[Any], rank: int):
        super().__init__((barrier, rank))
        self.barrier, self._laid_out, self._rank = barrier, laid_out, rank

    def _exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, in order; raise `RuntimeError` if some have finished."""
        self._laid_out[self._rank] = value
        self.barrier.wait()
        found = list(self._laid_out)
        self.barrier.wait()
        if value is not _DONE and any(each is _DONE for each in found):
            raise RuntimeError("ranks that share rows do not exchange as often as each other")
        return found

    def end(self) -> None:
        """Tell the other ranks that this one exchanges nothing more, and wait until all do."""
        self._exchange(_DONE)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._laid_out)

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self._rank

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, stacked, (ranks, ...)."""
        return torch.stack(self._exchange(values))

    def swap(self, parts: Tensor) -> Tensor:
        """Return every rank's part for this rank, detached and stacked, (ranks, ...)."""
        return torch.stack([each[self._rank] for each in self._exchange(parts.detach())])


def ranks_of_threads(count: int) -> list[ThreadGroup]:
    """Return the `ThreadGroup` of each of `count` ranks that share rows."""
    barrier, laid_out = threading.Barrier(count), [None] * count
    return [ThreadGroup(barrier, laid_out, rank) for rank in range(count)]


def run_together(groups: list[ThreadGroup], function: Callable[[ThreadGroup], _T]) -> list[_T]:
    """Run a function on all ranks at once, each in a thread; return the results by rank.

    If one raises, the others no longer wait for it, and its exception is raised here.
    """

    def on_one(group: ThreadGroup) -> _T:
        try:
            result = function(group)
            group.end()
            return result
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(len(groups), thread_name_prefix="autopack") as pool:
        running = [pool.submit(contextvars.copy_context().run, on_one, group) for group in groups]
        errors = [error for each in running if (error := each.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [each.result() for each in running]

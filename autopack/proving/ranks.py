"""Threads of this process that share packed rows as processes do, to test a twin on its part."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from autopack.runtime.row_group import RowGroup

_T = TypeVar("_T")
_DONE = object()
"""The value that a rank that has finished hands the others."""


class ThreadGroup(RowGroup):
    """The ranks as one of the threads sees them; `laid_out` holds the exchanged values."""

    of_processes = False

    def __init__(self, barrier: threading.Barrier, laid_out: list[Any], rank: int):
        super().__init__((barrier, rank))
        self.barrier, self._laid_out, self._rank = barrier, laid_out, rank

    def _of_all(self, value: Any) -> list[Any]:
        """Return every rank's value, in order; raise if some have finished already."""
        self._laid_out[self._rank] = value
        self.barrier.wait()
        found = list(self._laid_out)
        self.barrier.wait()
        if value is not _DONE and any(each is _DONE for each in found):
            raise RuntimeError("ranks that share rows do not exchange as often as each other")
        return found

    def end(self) -> None:
        """Tell the other ranks that this one exchanges nothing more, and wait until all do."""
        self._of_all(_DONE)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self._laid_out)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._rank

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, stacked."""
        return torch.stack(self._of_all(values))

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the part for this rank from every rank, stacked."""
        return torch.stack([each[self._rank] for each in self._of_all(parts.detach())])


def ranks_of_threads(count: int) -> list[ThreadGroup]:
    """Return a number of ranks that share rows."""
    barrier, laid_out = threading.Barrier(count), [None] * count
    return [ThreadGroup(barrier, laid_out, rank) for rank in range(count)]


def run_together(groups: list[ThreadGroup], function: Callable[[ThreadGroup], _T]) -> list[_T]:
    """Return a function's result on each of some ranks, which run at the same time.

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
        raise next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)),
            errors[0],
        )
    return [each.result() for each in running]

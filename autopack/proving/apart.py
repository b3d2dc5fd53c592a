"""Run code in threads of this process: apart, without modes in force where users enable models, or
as ranks that share packed rows.

Users build and enable models under a default device, DeepSpeed's `zero.Init`, autocast, modes of
torch, inside of transforms. A tiny model for measurements must not be made so.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopack.errors import UnsupportedModel
from autopack.runtime.row_group import RowGroup

_T = TypeVar("_T")
_DONE = object()
"""The value that a rank that has finished hands the others."""
_CONFIGURED = "_hf_deepspeed_config_weak_ref"

_here = threading.local()


def is_apart() -> bool:
    """Return True in code that `apart` runs, whose models are not the user's."""
    return getattr(_here, "apart", False)


def apart(function: Callable[[], _T]) -> _T:
    """Return `function()`, run in a thread without default devices, modes, autocast or ZeRO-3.

    Transforms are not in force there either: torch keeps nearly all of these by thread. Exceptions
    of the function are raised here. An interrupt waits until it has ended. Raises
    `UnsupportedModel` where constructors of the whole process make parameters without values.
    """
    context = contextvars.copy_context()

    def run() -> _T:
        _here.apart = True
        with _without_zero():
            if nn.LayerNorm(1).weight.is_meta:
                raise UnsupportedModel(
                    "models are made without weights here (init_empty_weights), the tiny copy too "
                    "by which this one is proven. Enable it outside of that context",
                    code="not-proven",
                )
            return context.run(function)

    with ThreadPoolExecutor(1, thread_name_prefix="autopack") as pool:
        return pool.submit(run).result()


@contextlib.contextmanager
def _without_zero() -> Iterator[None]:
    """Run a block as if ZeRO-3 were not configured, which distributes new models at once."""
    settings = sys.modules.get("transformers.integrations.deepspeed")
    reference = getattr(settings, _CONFIGURED, None)
    making = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    with contextlib.ExitStack() as undo:
        if reference is not None:
            vars(settings)[_CONFIGURED] = None
            undo.callback(setattr, settings, _CONFIGURED, reference)
        if getattr(making, "zero_init_context", 0):
            making.shutdown_init_context()  # type: ignore[union-attr]
            undo.callback(making.restore_init_context)  # type: ignore[union-attr]
        yield


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

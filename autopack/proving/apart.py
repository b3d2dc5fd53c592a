"""Make and run objects as in a fresh process: without modes in force where users enable models.

Users build and enable models under a default device, DeepSpeed's `zero.Init`, autocast, modes of
torch, inside of transforms. A tiny model for measurements must not be made so."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import nn

from autopack.errors import UnsupportedModel

_T = TypeVar("_T")
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

"""Make and run objects as in a fresh process: without modes in force where users enable models.

Users build and enable models under a default device, `init_empty_weights`, DeepSpeed's `zero.Init`,
autocast, modes of torch, inside of transforms. A tiny model for measurements must not be made so.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

_T = TypeVar("_T")
_MAKING = (
    *((nn.Module, name) for name in ("register_parameter", "register_buffer")),
    *((torch, name) for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "eye")),
)
"""Functions that libraries replace process-wide while models are made elsewhere or not at all."""
_CONFIGURED = "_hf_deepspeed_config_weak_ref"

_here = threading.local()


def is_apart() -> bool:
    """Return True if `apart` runs this code: models made here are not the user's."""
    return getattr(_here, "apart", False)


def apart(function: Callable[[], _T]) -> _T:
    """Call a function without default devices, modes, autocast, transforms, replaced constructors.

    It runs in a thread of its own, for torch keeps nearly all of these by thread. Functions that
    libraries replace for the whole process are put back meanwhile. Its exceptions are raised here.
    An interrupt waits until it has ended.
    """
    context = contextvars.copy_context()

    def run() -> _T:
        _here.apart = True
        with _as_torch_has_them(), _without_zero():
            return context.run(function)

    with ThreadPoolExecutor(1, thread_name_prefix="autopack") as pool:
        return pool.submit(run).result()


@contextlib.contextmanager
def _as_torch_has_them() -> Iterator[None]:
    """Restore torch's constructors and parameter registration (from `init_empty_weights`)."""
    with contextlib.ExitStack() as undo:
        for owner, name in _MAKING:
            found = getattr(owner, name)
            own = _innermost(found, name)
            if own is not found:
                undo.callback(setattr, owner, name, found)
                setattr(owner, name, own)
        yield


def _innermost(function: Any, name: str) -> Any:
    """Return torch's function of this name inside its wrappers, or the function itself."""
    waiting, seen = [function], set()
    while waiting:
        found = waiting.pop()
        if id(found) in seen or not callable(found):
            continue
        seen.add(id(found))
        of_torch = str(getattr(found, "__module__", "torch")).partition(".")[0] == "torch"
        if of_torch or not isinstance(found, FunctionType):
            if getattr(found, "__name__", None) == name:
                return found
            continue
        for cell in found.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
    return function


@contextlib.contextmanager
def _without_zero() -> Iterator[None]:
    """Run as if ZeRO-3 were not configured: it distributes transformers' new models at once."""
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

"""One thread at a time looks at an enabled model, marks it and proves it, in a whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_settling = threading.Lock()  # of the process and not of the model, for locks cannot be copied or pickled
_has_lock: ContextVar[bool] = ContextVar("autopack_has_lock", default=False)
SETTLERS: ContextVar[tuple[object, ...]] = ContextVar("autopack_settlers", default=())
"""What this thread, or those in whose context it runs, look at models with."""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock, once. Threads that are given the context of its holder, as those of twins are, have it, too."""
    if _has_lock.get():
        yield
        return
    with _settling:
        token = _has_lock.set(True)
        try:
            yield
        finally:
            _has_lock.reset(token)


def _begin_anew() -> None:
    """In a child of fork: the thread of the parent that holds it is not here."""
    global _settling
    _settling = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_anew)

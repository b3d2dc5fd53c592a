"""What has to be put back after a run, also where somebody interrupts that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def afterwards(put_back: Callable[[], None]) -> Iterator[None]:
    """Call `put_back` at the end of the block; where it is interrupted it is called again, not to be left half done."""
    try:
        yield
    finally:
        try:
            put_back()
        except BaseException:
            put_back()
            raise

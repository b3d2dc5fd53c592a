"""What a stretch of a program spends: processor time, and the peak of memory above what was there before."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.002
"""Seconds between two looks at the memory: a kernel needs longer to hand out ten megabytes."""


@dataclass
class Spent:
    """Seconds of processor time of all threads, and the peak of memory above the beginning, in bytes."""

    seconds: float = 0.0
    bytes: int = 0


def resident() -> int:
    """Anonymous memory of this process in bytes: what it has allocated, without mapped files and libraries."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no RssAnon: memory is measured on Linux")


@contextmanager
def spending() -> Iterator[Spent]:
    """Measure what the block spends; the result is filled in at its end, also where it raises."""
    gc.collect()
    _give_back()
    spent, done = Spent(), threading.Event()
    own = [0.0]
    before = peak = resident()

    def watch() -> None:
        nonlocal peak
        started = time.thread_time()
        while not done.wait(_INTERVAL):
            peak = max(peak, resident())
        own[0] = time.thread_time() - started

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.process_time()
    try:
        yield spent
    finally:
        used = time.process_time() - started
        peak = max(peak, resident())
        done.set()
        watcher.join()
        spent.seconds, spent.bytes = max(0.0, used - own[0]), peak - before


def _give_back() -> None:
    """Hand free memory of the allocator back, so that what is allocated next counts. glibc's own; others lack it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

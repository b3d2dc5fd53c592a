"""Processes that end in time, with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence

from benchmarks.gpu.machine import ROOT


def run_bounded(command: Sequence[str], seconds: float) -> tuple[int | None, list[str]]:
    """Run a command from the repository's root; its status, None if it had to be stopped, and its
    lines of output."""
    # A file and a group: who waits for the end of a pipe waits for the compilers that a stopped
    # process leaves behind.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _stop(process)
        output.seek(0)
        return status, output.read().decode(errors="replace").splitlines()


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

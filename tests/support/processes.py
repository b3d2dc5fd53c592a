"""Python in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*arguments: object, folder: Path = ROOT, status: int | None = 0, **environment: str):
    """Run Python in a process with these arguments, and return the completed process.

    Its folder and more of its environment may be given. It has to end with the status, if that is
    not None.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert status in (None, done.returncode), done.stdout[-2000:] + done.stderr
    return done

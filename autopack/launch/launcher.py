"""Start ``autopack run`` in a process: models wait for training, and a report is given at exit.

This is imported before the script and in every Python process that the script starts, so it imports
neither torch nor transformers.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopack.launch import session
from autopack.launch.settings import REPORTS, RUN, STARTED, RunSettings, without
from autopack.options import BadSetting


def start() -> None:
    """Start autopack in this process, if `autopack run` asks for it. Never raises."""
    if os.environ.get(RUN) != "1":
        return
    started = os.environ.pop(STARTED, "") == str(os.getpid())
    try:
        settings = RunSettings.read(os.environ)
    except BadSetting as error:
        session.warn_not_started(error)
        return
    if not settings.subprocesses:
        del os.environ[RUN]
        path = without(os.environ.pop("PYTHONPATH", ""))
        os.environ |= {"PYTHONPATH": path} if path else {}
    session.current = session.Session(settings, started, *_reports(settings.subprocesses))
    atexit.register(session.current.report)
    sys.meta_path.insert(0, _TransformersFinder(_file_of_wrapt()))


def _reports(shared: bool) -> tuple[Path, bool]:
    """Return (directory of all processes' outcomes, True if this process reports for all).

    The first process that comes here reports for all: the script, or the Python that a shell script
    starts. Another program may have replaced it since, and have its process id.
    """
    process, _, directory = os.environ.get(REPORTS, "").partition(":")
    if directory and shared:
        return Path(directory), process == str(os.getpid())
    import tempfile

    directory = tempfile.mkdtemp(prefix="autopack-")
    if shared:
        os.environ[REPORTS] = f"{os.getpid()}:{directory}"
    return Path(directory), True


class _TransformersFinder:
    """Import finder that finds nothing, but prepares models once transformers is imported.

    Most processes that a script starts never import transformers; they are spared the import of
    wrapt, and of asyncio with it.
    """

    asked = False

    def __init__(self, wrapt: str | None):
        self.wrapt = wrapt
        """File of wrapt that was found before the script's own directory was searched."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Return None; at the import of transformers, register the hook that prepares models."""
        # It stays where it is: who removes himself from the path here makes the import miss the
        # finder after him.
        if name == "transformers" and not self.asked:
            self.asked = True
            with _careful():
                if _file_of_wrapt() != self.wrapt:
                    raise ImportError(
                        f"autopack needs wrapt, and {_file_of_wrapt()} stands in front of it, "
                        "which the script does not import by itself: rename that file"
                    )
                import wrapt

                wrapt.register_post_import_hook(_prepare, "transformers.modeling_utils")


def _file_of_wrapt() -> str | None:
    """Return the file that an import of wrapt would run here, or None, without running it."""
    found = sys.modules.get("wrapt") or importlib.util.find_spec("wrapt")
    return getattr(found, "__file__", None) or getattr(found, "origin", None)


@contextmanager
def _careful() -> Iterator[None]:
    """Report an exception of the block instead of raising it, unless the run is strict."""
    try:
        yield
    except Exception as error:
        if session.current is not None and session.current.settings.strict:
            raise
        session.warn_not_started(error)


@_careful()
def _prepare(modeling_utils: Any) -> None:
    """Patch `PreTrainedModel` so that models made from now on wait for training."""
    from autopack.launch import first_call

    first_call.prepare(modeling_utils.PreTrainedModel)

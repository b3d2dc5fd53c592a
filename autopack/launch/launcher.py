"""What ``autopack run`` starts in a process: models wait for training from then on, and a report is given at exit.

Imported before the script and in every Python process that it starts, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

from autopack.launch.session import Session, _line, say
from autopack.launch.settings import RUN, STARTED, BadSetting, Settings, without

session: Session | None = None
"""That of this process, if `autopack run` has started autopack here."""


def start() -> None:
    """Start autopack in this process, if `autopack run` asks for it. Never raises."""
    global session
    if os.environ.get(RUN) != "1":
        return
    started = os.environ.pop(STARTED, "") == str(os.getpid())
    try:
        settings = Settings.read(os.environ)
    except BadSetting as error:
        say(f"warning: not started in this process: {error}")
        return
    if not settings.subprocesses:
        _keep_out_of_subprocesses()
    session = Session(settings, started)
    atexit.register(session.report)
    sys.meta_path.insert(0, _Transformers())


class _Transformers:
    """Finds nothing. Asked for transformers, it has the models prepared as soon as there are any.

    Most processes that a script starts never ask: they are spared the import of wrapt, and of asyncio with it.
    """

    def __init__(self) -> None:
        self.asked = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        # It stays where it is: who removes himself from the path here makes the import miss the finder after him.
        if name == "transformers" and not self.asked:
            self.asked = True
            _careful(_watch)


def _watch() -> None:
    import wrapt

    wrapt.register_post_import_hook(lambda module: _careful(_prepare, module), "transformers.modeling_utils")


def _prepare(modeling_utils: Any) -> None:
    from autopack.launch import first_call

    first_call.prepare(modeling_utils.PreTrainedModel)


def _careful(step: Callable[..., None], *arguments: Any) -> None:
    """Take a step; an exception, which would make the script's import fail, is said and raised only if `strict`."""
    try:
        step(*arguments)
    except Exception as error:
        if session is not None and session.settings.strict:
            raise
        say(f"warning: not started in this process: {_line(error)}")


def _keep_out_of_subprocesses() -> None:
    del os.environ[RUN]
    path = without(os.environ.get("PYTHONPATH"))
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = path

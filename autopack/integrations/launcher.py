"""What ``autopack run`` starts in a process: models wait for training from then on, and a report is given at exit.

Imported before the script and in every Python process that it starts, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopack.errors import AutopackError
from autopack.integrations.settings import RUN, STARTED, BadSetting, Settings, without

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.enabled import Enabled

__all__ = ["Session", "session", "start"]


class Session:
    """Autopack in one process: its settings, and what became of every model that was called in training."""

    def __init__(self, settings: Settings, started: bool):
        self.settings = settings
        self.started = started
        """Whether this process is the script that the user named, and not one that the script started."""
        self.process = os.getpid()
        self.waiting: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
        """Models that have not been called in training."""
        self._outcomes: list[_Outcome] = []
        self._bypassed: weakref.WeakKeyDictionary[PreTrainedModel, _Outcome] = weakref.WeakKeyDictionary()

    def enabled(self, model: PreTrainedModel, enabled: Enabled, by: str = "") -> None:
        """Note a model that is enabled."""
        bypassed = self._bypassed.pop(model, None)
        if bypassed is not None:
            self._outcomes.remove(bypassed)
        self._note(_Outcome(_name(model), f"enabled{by}", enabled))

    def left(self, model: PreTrainedModel, reason: str | BaseException) -> None:
        """Note a model that cannot be enabled, and say so."""
        outcome = _Outcome(_name(model), f"left as it is: {_line(reason)}")
        if not any(known.text == outcome.text and known.name == outcome.name for known in self._outcomes):
            say(f"warning: {outcome}")
        self._note(outcome)

    def bypassed(self, model: PreTrainedModel) -> None:
        """Note a model whose `forward` is called past its hooks, unless it will have been enabled by the end."""
        if model not in self._bypassed:
            outcome = _Outcome(_name(model), "left as it is: its forward is called directly, and not the model itself")
            self._bypassed[model] = outcome
            self._note(outcome)

    def report(self) -> None:
        """Print a line for every model that this very process called in training, once."""
        outcomes = [outcome for outcome in self._outcomes if outcome.process == os.getpid()]
        self._outcomes.clear()
        if self.settings.quiet:
            return
        for outcome in outcomes:
            say(str(outcome))
        # A crash has the last word: its traceback says what is missing.
        if not outcomes and self.started and self.process == os.getpid() and not hasattr(sys, "last_type"):
            say("no transformers model was called in training in this process")

    def _note(self, outcome: _Outcome) -> None:
        if os.getpid() != self.process and "multiprocessing.util" in sys.modules:
            # A forked child of multiprocessing leaves by os._exit, past atexit.
            self.process = os.getpid()
            sys.modules["multiprocessing.util"].Finalize(None, self.report, exitpriority=0)
        self._outcomes.append(outcome)


class _Outcome:
    def __init__(self, name: str, text: str, enabled: Enabled | None = None):
        self.name = name
        self.text = text
        # Not the model, its handle or all of `enabled`, which would keep it alive.
        self.tally = enabled.tally if enabled is not None else None
        self.unpad = enabled.unpad if enabled is not None else ""
        self.process = os.getpid()

    def __str__(self) -> str:
        if self.tally is None:
            return f"{self.name} {self.text}"
        padded = str(self.tally)
        if self.unpad == "never":
            padded = "padded batches stay as they come"
        elif not self.tally.batches and not self.tally.left:
            padded = "no padded batch came"
        return f"{self.name} {self.text}; {padded}"


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
    from autopack.integrations import first_call

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


def say(text: str) -> None:
    """Print one line on stderr; under torchrun with the rank, whose processes share it."""
    rank = os.environ.get("RANK", "")
    try:
        # In one piece, so that lines of several processes do not mix.
        sys.stderr.write(f"autopack: {f'rank {rank}: ' if rank else ''}{text}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass  # there is no stderr any more


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', '') or 'no model type'})"


def _line(reason: str | BaseException) -> str:
    known = isinstance(reason, str | AutopackError)
    return " ".join((str(reason) if known else f"{type(reason).__name__}: {reason}").split())

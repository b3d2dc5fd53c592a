"""Autopack in one process under ``autopack run``: its settings, what became of every model, and what is said of it.

Part of every Python process that the script starts, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopack import log
from autopack.errors import AutopackError
from autopack.launch.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.enabling.handle import Handle
    from autopack.runtime.tally import Tally
    from autopack.watching.sentinel import Watched


@dataclass(eq=False)
class _Outcome:
    """What became of one model. Holds its counts alone: the model, or what refers to it, would be kept alive.

    `pads` says whether padded batches may run without their padding.
    """

    text: str
    tally: Tally | None = None
    watched: Watched | None = None
    pads: bool = True
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        if self.tally is None:
            return self.text
        said = any((self.tally.batches, self.tally.left, self.tally.refused, self.tally.unmasked))
        batches = self.tally if said else "no padded batch came"
        parts = [self.text, str(batches) if self.pads else "padded batches stay as they come"]
        parts += [f"trained: {self.tally.trained}"] if self.tally.trained is not None else []
        parts += [f"watched: {self.watched}"] if self.watched is not None else []
        return "; ".join(parts)


class Session:
    """Autopack in one process: its settings, and what became of every model that was called in training.

    `started` says whether this process is the script that the user named, and not one that the script started;
    `waiting` holds the models that have not been called in training.
    """

    def __init__(self, settings: Settings, started: bool):
        self.settings, self.started = settings, started
        self.process = os.getpid()
        self.waiting: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
        self._outcomes: list[_Outcome] = []
        self._so_far: weakref.WeakKeyDictionary[PreTrainedModel, _Outcome] = weakref.WeakKeyDictionary()

    def enabled(self, model: PreTrainedModel, handle: Handle, by: str = "") -> None:
        """Note a model that is enabled."""
        self._forget(model)
        pads = handle.enabled.options.unpad != "never"
        self._note(_Outcome(f"{_name(model)} enabled{by}", handle.tally, handle.watched, pads))

    def left(self, model: PreTrainedModel, reason: Exception) -> None:
        """Note a model that cannot be enabled, and say so."""
        self._forget(model)
        outcome = _Outcome(f"{_name(model)} left as it is: {_line(reason)}")
        if str(outcome) not in map(str, self._outcomes):
            _say(f"warning: {outcome}")
        self._note(outcome)

    def bypassed(self, model: PreTrainedModel) -> None:
        """Note a model whose `forward` is called past its hooks, unless it will have been enabled by the end."""
        self._so_far_left(model, "its forward is called directly, and not the model itself")

    def evaluated(self, model: PreTrainedModel, derived: bool) -> None:
        """Note a model that is called outside of training, as a reference is, unless it will be trained by the end.

        `derived` says that it was called with gradients of its parameters.
        """
        why = "it was not trained, only called in evaluation or without gradients"
        mode = (
            "it was called with gradients, but in evaluation mode; if it is trained like that, call model.train() first"
        )
        self._so_far_left(model, mode if derived else why)

    def report(self) -> None:
        """Print a line for every model that this very process called in training, once."""
        outcomes = [outcome for outcome in self._outcomes if outcome.process == os.getpid()]
        self._outcomes.clear()
        if self.settings.quiet:
            return
        for outcome in outcomes:
            _say(str(outcome))
        # A crash has the last word: its traceback says what is missing.
        if not outcomes and self.started and self.process == os.getpid() and not hasattr(sys, "last_type"):
            _say("no transformers model was called in training in this process")

    def _so_far_left(self, model: PreTrainedModel, why: str) -> None:
        self._forget(model)
        self._so_far[model] = _Outcome(f"{_name(model)} left as it is: {why}")
        self._note(self._so_far[model])

    def _forget(self, model: PreTrainedModel) -> None:
        if model in self._so_far:
            self._outcomes.remove(self._so_far.pop(model))

    def _note(self, outcome: _Outcome) -> None:
        if os.getpid() != self.process and "multiprocessing.util" in sys.modules:
            # A forked child of multiprocessing leaves by os._exit, past atexit.
            self.process = os.getpid()
            sys.modules["multiprocessing.util"].Finalize(None, self.report, exitpriority=0)
        self._outcomes.append(outcome)


current: Session | None = None
"""That of this process, if `autopack run` has started autopack here."""


def warn_not_started(error: Exception) -> None:
    """Say that autopack does nothing in this process, and why."""
    _say(f"warning: not started in this process: {_line(error)}")


def _say(text: str) -> None:
    """Print one line on stderr; under torchrun with the rank, whose processes share it."""
    rank = os.environ.get("RANK", "")
    with suppress(AttributeError, OSError, ValueError):  # there may be no stderr any more
        log.write(f"autopack: {f'rank {rank}: ' if rank else ''}{text}")


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', '') or 'no model type'})"


def _line(error: Exception) -> str:
    kind = "" if isinstance(error, AutopackError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())

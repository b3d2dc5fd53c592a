"""Autopack in one process under ``autopack run``: its settings, what became of every model, and what is said of it."""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING

from autopack.errors import AutopackError
from autopack.launch.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.runtime.model import EnabledModel


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

    def enabled(self, model: PreTrainedModel, enabled: EnabledModel, by: str = "") -> None:
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
    def __init__(self, name: str, text: str, enabled: EnabledModel | None = None):
        self.name = name
        self.text = text
        # Not the model, its handle or all of `enabled`, which would keep it alive.
        self.tally = enabled.tally if enabled is not None else None
        self.unpad = enabled.options.unpad if enabled is not None else ""
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

"""Autopack in one process under ``autopack run``: its settings, outcomes and reports.

This is part of every Python process that the script starts, so it imports neither torch nor
transformers.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autopack.errors import in_a_line
from autopack.launch import lines
from autopack.launch.outcome import ProcessOutcome, is_first, keep, kept, summed
from autopack.launch.settings import RunSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.runtime.model import EnabledModel


class Session:
    """Autopack in one process: its settings, and the outcome of every model called in training.

    `started` is True in the process of the script that the user named, and False in processes that
    the script started. `waiting` holds the models that have not been called in training. Processes
    leave their report in the directory of `reports` to the one that `speaks`.
    """

    def __init__(self, settings: RunSettings, started: bool, reports: Path, speaks: bool = True):
        self.settings, self.started, self.reports = settings, started, reports
        self.process = os.getpid()
        self._speaker = self.process if speaks else None
        self._times_kept, self._kept_until = 0, 0.0
        self.waiting: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
        self._outcomes: list[ProcessOutcome] = []
        self._so_far: weakref.WeakKeyDictionary[PreTrainedModel, ProcessOutcome] = (
            weakref.WeakKeyDictionary()
        )

    def enabled(self, model: PreTrainedModel, enabled: EnabledModel, by: str = "") -> None:
        """Note a model that is enabled."""
        checked = enabled.live and enabled.live.checked
        text = f"{_name(model)} enabled{by}"
        self._note(model, ProcessOutcome(text, enabled.tally, checked, enabled.options.unpad))
        if self._speaker != os.getpid():
            from autopack.runtime import tally

            tally.after_each = self._keep

    def left(self, model: PreTrainedModel, reason: Exception) -> None:
        """Note a model that cannot be enabled, and log the reason."""
        outcome = ProcessOutcome(f"{_name(model)} left as it is: {in_a_line(reason)}")
        if is_first(outcome.text, self.reports):
            _say(f"warning: {outcome.text}")
        self._note(model, outcome)

    def left_so_far(self, model: PreTrainedModel, why: str) -> None:
        """Note a model that is called without being enabled, unless it has been by the end."""
        outcome = ProcessOutcome(f"{_name(model)} left as it is: {why}")
        self._note(model, outcome)
        self._so_far[model] = outcome

    def report(self) -> None:
        """Report once, in a line per model, the outcome of every model called in training.

        The process that speaks reports for the others as well, which leave their outcomes to it.
        """
        outcomes = self._mine()
        self._outcomes.clear()
        speaks = self._speaker == os.getpid()
        if speaks:
            outcomes = summed([*kept(self.reports), *outcomes])
            import shutil

            shutil.rmtree(self.reports, ignore_errors=True)
        elif outcomes and keep(outcomes, self.reports):
            return
        if self.settings.quiet:
            return
        for outcome in outcomes:
            _write(str(outcome))
        # A crash has the last word: its traceback says what is missing.
        if not outcomes and speaks and self.started and not hasattr(sys, "last_type"):
            _say(
                "no transformers model was called in training"
                + ("" if self.settings.subprocesses else " in this process")
            )

    def _mine(self) -> list[ProcessOutcome]:
        """Return the outcomes of this process, with its rank."""
        mine = [outcome for outcome in self._outcomes if outcome.process == os.getpid()]
        for outcome in mine:
            # launchers set it before the first call, or after
            outcome.rank = os.environ.get("RANK", "")
        return mine

    def _keep(self) -> None:
        """Leave the counts to the process that speaks, in case this one is killed (Ray kills
        workers).

        This takes some 0.2 ms; it is done at each of the first calls, and then for at most 0.5 % of
        the time.
        """
        now = time.perf_counter()
        if self._times_kept < 100 or now >= self._kept_until:
            keep(self._mine(), self.reports)
            self._times_kept += 1
            self._kept_until = now + 200 * (time.perf_counter() - now)

    def _note(self, model: PreTrainedModel, outcome: ProcessOutcome) -> None:
        """Note the outcome of a model; it replaces the earlier one."""
        if model in self._so_far:
            self._outcomes.remove(self._so_far.pop(model))
        if os.getpid() != self.process and "multiprocessing.util" in sys.modules:
            # A forked child of multiprocessing leaves by os._exit, past atexit.
            self.process = os.getpid()
            sys.modules["multiprocessing.util"].Finalize(None, self.report, exitpriority=0)
        self._outcomes.append(outcome)


current: Session | None = None
"""Session of this process, if `autopack run` has started autopack here."""


def warn_not_started(error: Exception) -> None:
    """Log that autopack does nothing in this process, and why."""
    _say(f"warning: not started in this process: {in_a_line(error)}")


def _say(text: str) -> None:
    """Print one line on stderr; under torchrun, whose processes share it, with the rank."""
    rank = os.environ.get("RANK", "")
    _write(f"{f'rank {rank}: ' if rank else ''}{text}")


def _write(text: str) -> None:
    """Write a line on stderr, if there is one."""
    with suppress(AttributeError, OSError, ValueError):  # there may be no stderr any more
        lines.write(f"autopack: {text}")


def _name(model: PreTrainedModel) -> str:
    """Return a model's class and type, for messages."""
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', '') or 'no model type'})"

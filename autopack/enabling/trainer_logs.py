"""A callback by which a `transformers.Trainer` logs how full the rows of its model are, beside its losses."""

from __future__ import annotations

import time
from typing import Any

from transformers.trainer_callback import TrainerCallback

from autopack.integrations.trainers import callbacks_of
from autopack.runtime.tally import Tally, Volume
from autopack.steps.fitting import AUTO
from autopack.steps.trainers import cutter_of

_PREFIX = "autopack/"


class PackingLogs(TrainerCallback):
    """Puts `autopack/fill` and its like into the logs of a trainer; what it counts from is the tally of its model.

    Callbacks share one dict of logs, in order, so it has to stand before those that report. The logs of an evaluation,
    and those at the end of a training, are also what `evaluate()` and `train()` return; there they are taken out again,
    as an objective may be the sum of all that is returned.
    """

    def __init__(self, trainer: Any, tally: Tally):
        self._trainer, self._tally = trainer, tally
        self._trained = self._trained_before = tally.training
        self._evaluated = tally.evaluation
        self._clock = _Clock()
        self._begins = False
        self._added: tuple[dict[str, Any], list[str]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trained = self._trained_before = self._tally.training
        self._evaluated = self._tally.evaluation
        self._begins = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._begins:  # and not before: reporters begin a run of theirs, which may take seconds, and come after this
            self._clock = _Clock()
            self._begins = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.mark()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.leave_out()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.leave_out()
        self._take_out()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._clock.leave_out()
        self._evaluated = self._tally.evaluation  # nothing is logged of it

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._take_out()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None:
            return
        # The first have a runtime too where the trainer counts tokens; logs of a script come at any time.
        if "loss" in logs and "learning_rate" in logs:
            ran, self._trained = self._tally.training.minus(self._trained), self._tally.training
            added = numbers(ran, self._clock.lap(), shares=self._tally.training.shared > 0)
            if (cutter := cutter_of(self._trainer)) is not None and cutter.steps:
                added[f"{_PREFIX}micro_batches"] = round(cutter.micro_batches / cutter.steps, 2)
                added[f"{_PREFIX}slowest_rank"] = round(cutter.slowest, 4)
                added |= {f"{_PREFIX}max_tokens": cutter.max_tokens} if cutter.asked == AUTO else {}
            self._add(logs, added)
            last = state.log_history[-1] if state.log_history else {}
            if last.get("step") == state.global_step and "loss" in last:
                last.update(added)
        elif "total_flos" in logs:
            ran = self._tally.training.minus(self._trained_before)
            self._add(logs, numbers(ran, self._clock.total, "train_"))
        elif (runtime := next((name for name in logs if name.endswith("_runtime")), None)) is not None:
            ran, self._evaluated = self._tally.evaluation.minus(self._evaluated), self._tally.evaluation
            shares = self._tally.evaluation.shared > 0
            self._add(logs, numbers(ran, float(logs[runtime]), runtime.removesuffix("runtime"), shares))

    def _add(self, logs: dict[str, Any], added: dict[str, float]) -> None:
        logs.update(added)
        self._added = logs, list(added)

    def _take_out(self) -> None:
        logs, names = self._added or ({}, [])
        for name in names:
            logs.pop(name, None)
        self._added = None


class _Clock:
    """Seconds of training, without evaluations and checkpoints that came between its steps."""

    def __init__(self) -> None:
        self._began = self._lap = self._marked = time.perf_counter()
        self._out = 0.0

    def mark(self) -> None:
        """A step has ended; what comes next may be left out."""
        self._marked = time.perf_counter()

    def leave_out(self) -> None:
        """Leave out the time since the last mark."""
        self._out += time.perf_counter() - self._marked
        self.mark()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter() - self._out
        seconds, self._lap = now - self._lap, now
        self.mark()
        return seconds

    @property
    def total(self) -> float:
        return time.perf_counter() - self._out - self._began


def numbers(ran: Volume, seconds: float, prefix: str = "", shares: bool = False) -> dict[str, float]:
    """Return the logged numbers of some calls in so many seconds; none if nothing ran.

    What was shared is logged from the first time on (`shares`), 0 too: a chart draws a line through what is missing,
    and a summary keeps the last number that there was.
    """
    if not ran.calls:
        return {}
    found = {
        "fill": round(ran.fill, 4),
        "padding_skipped": round(ran.padding_skipped, 4),
        "documents_per_row": round(ran.documents_per_row, 2),
    }
    if ran.shared or shares:
        found["shared"] = round(ran.shared / ran.tokens, 4)
    if seconds > 0:
        found["real_tokens_per_second"] = round(ran.tokens / seconds, 1)
    return {f"{prefix}{_PREFIX}{name}": value for name, value in found.items()}


def add_logs(trainer: Any, tally: Tally) -> None:
    """Have a trainer log what its model's calls hold; one that does already goes on with this tally."""
    take_logs(trainer)
    callbacks_of(trainer).insert(0, PackingLogs(trainer, tally))


def take_logs(trainer: Any) -> None:
    """Take back what `add_logs` has done."""
    callbacks = callbacks_of(trainer)
    callbacks[:] = [each for each in callbacks if not isinstance(each, PackingLogs)]


def logs_packing(trainer: Any) -> bool:
    """Return True if a trainer has the callback."""
    return any(isinstance(each, PackingLogs) for each in callbacks_of(trainer))

"""Callback by which a transformers `Trainer` logs, with its losses, how full its rows are."""

from __future__ import annotations

import time
from functools import partialmethod
from typing import Any

from transformers.trainer_callback import TrainerCallback

from autopack.integrations.trainers import callbacks_of
from autopack.runtime.tally import Tally, Volume
from autopack.steps.step import AUTO
from autopack.steps.trainers import cutter_of

_PREFIX = "autopack/"


class PackingLogs(TrainerCallback):
    """Callback that adds `autopack/fill` and other counts of a model to a trainer's logs.

    Callbacks share one dict of logs, in order, so it has to stand before those that report. The
    logs of an evaluation, and those at the end of a training, are also what `evaluate()` and
    `train()` return; there they are taken out again, as an objective may be the sum of all that is
    returned.
    """

    def __init__(self, trainer: Any, tally: Tally):
        self._trainer, self._tally = trainer, tally
        self._added: tuple[dict[str, Any], list[str]] = {}, []
        self._begin()

    def _begin(self, *_: Any, **__: Any) -> None:
        """Reset the counts of tokens and seconds that the next logs report."""
        self._trained = self._trained_before = self._tally.training
        self._evaluated = self._tally.evaluation
        self._seconds = self._logged = 0.0
        # None until the first step begins: reporters begin a run of theirs before, which may take
        # seconds.
        self._since: float | None = None

    def _add_time(self, *_: Any, counts: bool = True, **__: Any) -> None:
        """Add the seconds since this method's last call, unless `counts` is False; begin anew."""
        now = time.perf_counter()
        if counts and self._since is not None:
            self._seconds += now - self._since
        self._since = now

    on_train_begin, on_step_end = _begin, _add_time

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock at the first step."""
        if self._since is None:
            self._add_time()

    on_save = partialmethod(_add_time, counts=False)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Leave out the time of an evaluation, and take autopack's counts out of its logs."""
        self._add_time(counts=False)
        self.on_train_end()

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Leave out the time and the counts of a prediction."""
        self._add_time(counts=False)
        self._evaluated = self._tally.evaluation  # nothing is logged of it

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take autopack's counts out of the last logs before the trainer returns them."""
        logs, names = self._added
        for name in names:
            logs.pop(name, None)
        self._added = {}, []

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the counts since the last log to the logs of a trainer."""
        if logs is None:
            return
        # The first have a runtime too where the trainer counts tokens; logs of a script come at any
        # time.
        trained, evaluated = self._tally.training, self._tally.evaluation
        if "loss" in logs and "learning_rate" in logs:
            self._add_time()
            ran, self._trained = trained.minus(self._trained), trained
            added = numbers(ran, self._seconds - self._logged, shares=trained.shared > 0)
            self._logged = self._seconds
            if (cutter := cutter_of(self._trainer)) is not None and cutter.steps:
                added[f"{_PREFIX}micro_batches"] = round(cutter.micro_batches / cutter.steps, 2)
                added[f"{_PREFIX}slowest_rank"] = round(cutter.slowest, 4)
                added |= {f"{_PREFIX}max_tokens": cutter.max_tokens} if cutter.asked == AUTO else {}
            last = state.log_history[-1] if state.log_history else {}
            if last.get("step") == state.global_step and "loss" in last:
                last.update(added)
        elif "total_flos" in logs:
            self._add_time()
            ran = trained.minus(self._trained_before)
            added = numbers(ran, self._seconds, "train_")
        elif (
            runtime := next((name for name in logs if name.endswith("_runtime")), None)
        ) is not None:
            ran, self._evaluated = evaluated.minus(self._evaluated), evaluated
            shares = evaluated.shared > 0
            added = numbers(ran, float(logs[runtime]), runtime.removesuffix("runtime"), shares)
        else:
            return
        logs.update(added)
        self._added = logs, list(added)


def numbers(
    ran: Volume, seconds: float, prefix: str = "", shares: bool = False
) -> dict[str, float]:
    """Return the numbers to log for calls that ran in so many seconds; {} if nothing ran.

    What was shared is logged from the first time on (`shares`), 0 too: a chart draws a line through
    what is missing, and a summary keeps the last number that there was.
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
    """Put a callback that logs `tally` first on a trainer, in place of an earlier one."""
    take_logs(trainer)
    callbacks_of(trainer).insert(0, PackingLogs(trainer, tally))


def take_logs(trainer: Any) -> None:
    """Take the callback that logs packing off a trainer."""
    callbacks = callbacks_of(trainer)
    callbacks[:] = [each for each in callbacks if not isinstance(each, PackingLogs)]


def logs_packing(trainer: Any) -> bool:
    """Return True if a trainer has the callback that logs packing."""
    return any(isinstance(each, PackingLogs) for each in callbacks_of(trainer))

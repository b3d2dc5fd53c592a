"""Autopack in one process under `autopack run`: its settings, outcomes and reports.

This is part of every Python process that the script starts, so it imports neither torch nor
transformers.

Each process keeps its outcomes in a file, while it runs and when it ends (a killed one leaves what
it had). The first process makes the directory of these files, reads them all when it ends, and
reports them.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopack.errors import in_a_line
from autopack.launch import lines
from autopack.launch.settings import RunSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.runtime.model import EnabledModel
    from autopack.runtime.tally import Checked, Tally


@dataclass(eq=False)
class ProcessOutcome:
    """Outcome of one model under `autopack run`, in one process or in several.

    It holds counts alone: a reference to the model would keep the model alive. `pads` says whether
    padded batches may run without their padding.
    """

    text: str
    tally: Tally | None = None
    checked: Checked | None = None
    pads: bool = True
    process: int = field(default_factory=os.getpid)
    rank: str = ""
    processes: int = 1

    def __str__(self) -> str:
        who = f"{self.processes} processes: " if self.processes > 1 else _of_rank(self.rank)
        parts, tally = [f"{who}{self.text}"], self.tally
        if tally is not None:
            said = any((tally.batches, tally.left, tally.refused, tally.unmasked))
            batches = f"{tally}" if said else "no padded batch came"
            parts.append(batches if self.pads else "padded batches stay as they come")
            if tally.trained is not None:
                parts.append(f"trained: {tally.trained}")
        if self.checked is not None and self.checked.every:
            parts.append(f"checked: {self.checked}")
        return "; ".join(parts)

    def add(self, other: ProcessOutcome) -> None:
        """Add another process's counts of the same model to these, in place."""
        self.processes += other.processes
        if self.tally is not None and other.tally is not None:
            self.tally.add(other.tally)
        if self.checked is not None and other.checked is not None:
            self.checked.add(other.checked)

    def __getstate__(self) -> dict[str, Any]:
        # Kinds of calls are of this process.
        return {**vars(self), "checked": self.checked and replace(self.checked, kinds=set())}


def summed(outcomes: Iterable[ProcessOutcome]) -> list[ProcessOutcome]:
    """Return one outcome per model: the first process's, with all others' counts added in place.

    The n-th model of a kind in one process is the n-th in another.
    """
    found: dict[tuple[Any, ...], ProcessOutcome] = {}
    times: Counter[tuple[Any, ...]] = Counter()
    for each in sorted(outcomes, key=lambda each: (each.rank.zfill(9), each.process)):
        same = (each.text, each.pads)
        times[(each.process, same)] += 1
        key = (same, times[(each.process, same)])
        if (first := found.setdefault(key, each)) is not each:
            first.add(each)
    return list(found.values())


def keep(outcomes: Iterable[ProcessOutcome], directory: Path) -> bool:
    """Write outcomes to this process's file in a directory; return False if that fails."""
    import pickle

    kept = directory / f"{os.getpid()}.outcomes"
    part = kept.with_suffix(".part")
    try:
        part.write_bytes(pickle.dumps(list(outcomes)))
        os.replace(part, kept)  # whoever is killed in between leaves the file as it was
    except OSError:
        return False
    return True


def kept(directory: Path) -> list[ProcessOutcome]:
    """Return the outcomes in the files of all processes in a directory."""
    import pickle

    return [
        each
        for file in sorted(directory.glob("*.outcomes"))
        for each in pickle.loads(file.read_bytes())
    ]


def is_first(text: str, directory: Path) -> bool:
    """Return True if no process has passed this text yet, and mark it by a file."""
    said = directory / f"{zlib.crc32(text.encode()):08x}.said"
    try:
        said.open("x").close()
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


class Session:
    """Autopack in one process: its settings, and the outcome of every model called in training.

    `started` is True in the process of the script that the user named, and False in processes that
    the script started. `waiting` holds the models that have not been called in training. Processes
    write their outcomes to the directory `reports`, and the one that `speaks` reports all.
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
        """Record a model as enabled; `by` is added to the text of its outcome."""
        checked = enabled.live and enabled.live.checked
        text = f"{_name(model)} enabled{by}"
        self._note(model, ProcessOutcome(text, enabled.tally, checked, enabled.options.unpad))
        if self._speaker != os.getpid():
            from autopack.runtime import tally

            tally.after_each = self._keep

    def left(self, model: PreTrainedModel, reason: Exception) -> None:
        """Record that a model cannot be enabled, and report the reason, once in all processes."""
        outcome = ProcessOutcome(f"{_name(model)} left as it is: {in_a_line(reason)}")
        if is_first(outcome.text, self.reports):
            _say(f"warning: {outcome.text}")
        self._note(model, outcome)

    def left_so_far(self, model: PreTrainedModel, why: str) -> None:
        """Record that a model runs without autopack; its next outcome replaces this one."""
        outcome = ProcessOutcome(f"{_name(model)} left as it is: {why}")
        self._note(model, outcome)
        self._so_far[model] = outcome

    def report(self) -> None:
        """Write a line on stderr for each model called in training, and forget the outcomes.

        The process that speaks reports for the others as well, which write their outcomes to files.
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
        """Return the outcomes that this process has recorded, with its rank set in them."""
        mine = [outcome for outcome in self._outcomes if outcome.process == os.getpid()]
        for outcome in mine:
            # launchers set it before the first call, or after
            outcome.rank = os.environ.get("RANK", "")
        return mine

    def _keep(self) -> None:
        """Write this process's counts to its file, in case it is killed (Ray kills workers).

        This takes some 0.2 ms; it is done at each of the first calls, and then for at most 0.5 % of
        the time.
        """
        now = time.perf_counter()
        if self._times_kept < 100 or now >= self._kept_until:
            keep(self._mine(), self.reports)
            self._times_kept += 1
            self._kept_until = now + 200 * (time.perf_counter() - now)

    def _note(self, model: PreTrainedModel, outcome: ProcessOutcome) -> None:
        """Record the outcome of a model, in place of one by `left_so_far`."""
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
    """Write on stderr that autopack was not started in this process, and why."""
    _say(f"warning: not started in this process: {in_a_line(error)}")


def _say(text: str) -> None:
    """Write a line on stderr, after this process's rank if it has one."""
    _write(f"{_of_rank(os.environ.get('RANK', ''))}{text}")


def _of_rank(rank: str) -> str:
    """Return the beginning of a line of a rank, or "" without ranks."""
    return f"rank {rank}: " if rank else ""


def _write(text: str) -> None:
    """Write a line with autopack's name on stderr; do nothing where there is no stderr."""
    with suppress(AttributeError, OSError, ValueError):  # there may be no stderr any more
        lines.write(f"autopack: {text}")


def _name(model: PreTrainedModel) -> str:
    """Return a model's class and model type as text, for messages."""
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', '') or 'no model type'})"

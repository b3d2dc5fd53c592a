"""Check calls of one model while it is used: every N-th training call, and of foreign code what it has not shown."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._subclasses import FakeTensor

from autopack.calls.call import Call
from autopack.errors import Leak, LeakDetected
from autopack.inspection import torches
from autopack.inspection.sharding import in_a_group
from autopack.patching import ProcessLock
from autopack.runtime.runs import Found, most
from autopack.watching.envelope import Checked

_checks = ProcessLock()


class _Mine(threading.local):
    """Whether this thread is at a check: what that runs is none of the user's calls."""

    checking = False


_mine = _Mine()


class Sentinel:
    """Counts the calls of one model and checks some of them. It holds no part of the model.

    Checked are every N-th training call, where that was asked for, and of a model that runs code other than the
    libraries' also those that go beyond what was checked.
    """

    def __init__(self, every: int):
        self.checked = Checked(every=every)
        self._calls = 0

    def begin_anew(self) -> None:
        """Forget how far calls have been checked, since the code or what it reads is something else now."""
        self.checked.begin_anew()

    def before(self, call: Call) -> None:
        """Remember what a call begins with, where it is one that will be checked by itself."""
        # Ranks that gather parameters together find out at the end which calls they check.
        if _mine.checking or call.model.is_settling or call.model.groups or _is_recorded(call):
            return
        if self.checked.is_left_by(self.checked.shape_of(call)):
            call.found = Found(call.module)

    def __call__(self, call: Call, output: Any, packs: bool) -> None:
        """Count a call of the whole model, once it has run; raises `LeakDetected` where a check finds a leak."""
        if _mine.checking or call.model.is_settling or _is_recorded(call):
            return
        # A check switches off on the model what draws noise, which another one must not take for its state.
        with _checks.held():
            _mine.checking = True
            try:
                leak = self._of_training(call, output, packs) or self._of_envelope(call, output, packs)
            finally:
                _mine.checking = False
        if leak is not None:
            raise LeakDetected(leak)

    def _of_training(self, call: Call, output: Any, packs: bool) -> Leak | None:
        trains = call.module.training and torch.is_grad_enabled()
        # Ranks must agree on when to check, and each has batches of its own.
        if not (self.checked.every and trains and (packs or in_a_group())):
            return None
        self._calls += 1
        if self._calls % self.checked.every:
            return None
        return self.checked.check(call, output, packs, self._calls, self._calls // self.checked.every - 1)

    def _of_envelope(self, call: Call, output: Any, packs: bool) -> Leak | None:
        """Check a call of third-party code, where it is unlike those that have been checked."""
        groups = call.model.groups
        if not call.model.runs_other_code or not (packs or groups):
            return None
        shape = self.checked.shape_of(call) if packs else None
        due = shape is not None and self.checked.is_left_by(shape)
        if groups:
            due = bool(most(groups, [int(due)])[0])
        leak = self.checked.check_call(call, output, packs) if due else None
        if shape is not None and leak is None:
            self.checked.grow(shape, checked=due)
        return leak


def _is_recorded(call: Call) -> bool:
    """Whether the call is recorded, stands for many or has no values, so that nothing else may be run beside it."""
    return torches.is_recorded() or isinstance(call.inputs, FakeTensor) or getattr(call.inputs, "is_meta", False)

"""Check calls of one model while it is used: nothing but a document's own tokens may change what it gets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensor

from autopack.auditing.running import DRAWN
from autopack.calls.call import Call
from autopack.errors import Leak, LeakDetected, UnsupportedModel
from autopack.inspection import media, torches
from autopack.inspection.code_origin import whose
from autopack.inspection.put_on import is_foreign_hook
from autopack.inspection.randomness import draws_by_itself
from autopack.patching import ProcessLock
from autopack.runtime.tally import Checked
from autopack.watching import influence
from autopack.watching.alone import beside_stock
from autopack.watching.conditions import Difference
from autopack.watching.owners import CannotTell, sides_of
from autopack.watching.replaced import replaced
from autopack.watching.schedule import is_padded, shape_of

logger = logging.getLogger(__name__)
_checks = ProcessLock()
_REPLACED = "when other documents were replaced"


class _Mine(threading.local):
    """The state of a thread: `checking` while it runs calls of a check, which are not the user's."""

    checking = False


_mine = _Mine()


class Live:
    """Checks of the calls of one model. It holds no part of the model."""

    def __init__(self, every: int):
        self.checked = Checked(every=every)
        self._padded = False
        """True if a padded batch was checked, and gave what stock gives."""
        self._pulled = False
        """True if gradients were checked since the model was last changed."""
        self.has_checked = self._has_tried = False

    def begin_anew(self) -> None:
        """Forget how far calls have been checked, since the code or what it reads is something else now."""
        self.checked.begin_anew()
        self._padded = self._pulled = self.has_checked = self._has_tried = False

    def before(self, call: Call) -> None:
        """Count a call that is to run packed or without its padding, and check it if its turn has come.

        Raises `LeakDetected`. If the first padded batch of a kind differs from stock's, `proof.padded` says so.
        """
        if self._passes_by(call):
            return
        if call.model.groups:
            return _refuse_backward_hooks(call)
        if call.part is not None:
            return self._check_together(call, packs=True)
        closely = call.model.is_checked_closely
        shape = shape_of(call, closely)
        beyond = self.checked.goes_beyond(*shape, closely)
        due = self.checked.is_due(call.module.training and torch.is_grad_enabled())
        if self._has_tried and not (due or beyond):  # other threads wait for the first check
            return
        leak = self._found(call, closely, beyond)
        if leak is None:
            self.checked.grow(*shape)
            return
        self.checked.leaks += 1
        if is_padded(call) and (beyond or not self._padded):  # none of its kind has run without its padding
            reason = f"it was not exact without its padding when its first batch was checked: {leak}"
            call.model.proof = replace(call.model.proof, padded=reason)
            logger.warning("padded batches of %s stay as they come: %s", call.name, leak)
            return
        raise LeakDetected(leak)

    def after(self, call: Call, packs: bool) -> None:
        """Check a call that ranks have run together, in which they gather parameters: calls 1, 2, 4, 8 and so on.

        Every rank runs the call equally often, whatever it has. Raises `LeakDetected`.
        """
        if not self._passes_by(call) and call.model.groups:
            self._check_together(call, packs)

    def _check_together(self, call: Call, packs: bool) -> None:
        """Check calls 1, 2, 4, 8 and so on of all, since ranks may have changed the model at different calls."""
        checked = self.checked
        checked.calls += 1
        if checked.calls & (checked.calls - 1) and not (checked.every and checked.calls % checked.every == 0):
            return
        leak = self._found_together(call, packs)
        if leak is not None:
            checked.leaks += 1
            raise LeakDetected(leak)

    def _passes_by(self, call: Call) -> bool:
        return _mine.checking or call.model.is_settling or _is_recorded(call)

    def _found(self, call: Call, closely: bool, beyond: bool) -> Leak | None:
        """Return the leak of a call; count the check, or say why it could not be made."""
        padded, told = is_padded(call), False
        trains = call.module.training and torch.is_grad_enabled()
        ways: list[Callable[[Call], Leak | None]] = [partial(self._by_replacement, both=closely)]
        if closely or beyond or self.checked.every or not self.has_checked:
            ways.append(partial(self._by_stock, losses=closely or not self.has_checked))
        by_gradients = bool(media.given(call.arguments)) or (closely and trains and not self._pulled)
        if closely and call.module.training and draws_by_itself(call.module):
            ways.append(partial(self._by_chance, both=closely))
        if by_gradients and not padded:
            ways.append(partial(influence.leak_of, step=self.checked.calls))
        reasons: dict[Any, str] = {}
        for way in ways:
            try:
                with _checking():
                    leak = way(call)
            except CannotTell as reason:
                reasons[way] = str(reason)
            except Exception as error:  # somebody else's code must not end a training run that is exact
                reasons[way] = f"running it again raised {type(error).__name__}: {error}".partition("\n")[0]
            else:
                told = True
                if leak is not None:
                    self.checked.checks += 1
                    return leak
        self._has_tried = True
        self.checked.checks += told
        if not told:
            self._skip(call, next(iter(reasons.values())), closely)
        elif media.given(call.arguments) and ways[-1] in reasons:  # of media nothing else tells
            self._skip(call, reasons[ways[-1]], closely)
        self._padded |= told and padded
        self._pulled |= trains
        self.has_checked |= told
        return None

    def _skip(self, call: Call, reason: str, closely: bool) -> None:
        if closely and not self.checked.skipped[reason]:
            logger.warning("autopack could not check a call of %s: %s", call.name, reason)
        self.checked.skipped[reason] += 1

    def _by_replacement(self, call: Call, both: bool, share: float | None = None) -> Leak | None:
        return self._leak_of(call, replaced(call, self.checked.checks, both, share), _REPLACED)

    def _by_chance(self, call: Call, both: bool) -> Leak | None:
        """Replace documents while every draw is near its least, and near its largest: code may mix by what it draws."""
        leaks = (self._by_replacement(call, both, share) for share in DRAWN.values())
        return next((leak for leak in leaks if leak is not None), None)

    def _by_stock(self, call: Call, **how: bool) -> Leak | None:
        found = beside_stock(call, **how)
        self.checked.worst = max(self.checked.worst, found.error)
        return self._leak_of(call, found, "than in its padded batch" if is_padded(call) else "than it gets alone")

    def _leak_of(self, call: Call, found: Difference, than: str) -> Leak | None:
        if found.excess <= 1:
            return None
        row, columns = sides_of(call).halves[0].place_of(found.document)
        numbers = (found.error, found.tolerance, self.checked.calls)
        return Leak(call.name, found.document, row, columns, found.name, *numbers, than, found.module)

    def _found_together(self, call: Call, packs: bool) -> Leak | None:
        turn = self.checked.calls.bit_length()  # the same on all ranks
        leak, told = None, False
        with _checking():
            try:
                leak = self._leak_of(call, replaced(call, turn, packs=packs, together=True), _REPLACED)
                told = True
            except CannotTell as reason:
                if packs:
                    self._skip(call, str(reason), call.model.is_checked_closely)
            if call.model.groups:
                with suppress(CannotTell):  # of a call that replacement alone can tell of
                    beside = self._by_stock(call, packs=packs, together=True)
                    leak, told = leak or beside, True
        self.checked.checks += told
        return leak


def _refuse_backward_hooks(call: Call) -> None:
    """Raise `UnsupportedModel` for packed rows on ranks that gather parameters, if a hook may change gradients."""
    if not call.model.is_checked_closely or is_padded(call):
        return
    for name, module in call.module.named_modules():
        held = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
        hook = next((hook for hook in held if is_foreign_hook(hook)), None)
        if hook is not None:
            raise UnsupportedModel(
                f"{whose(hook)} is a backward hook on {name or call.name}, and ranks gather its parameters, so its "
                f"gradients cannot be checked. Take it off, or run the documents one per row.",
                code="not-exact",
            )


@contextmanager
def _checking() -> Iterator[None]:
    """Run calls that are none of the user's, one check of the process at a time.

    A check switches off on the model what draws noise, which another one must not take for its state.
    """
    with _checks.held():
        _mine.checking = True
        try:
            yield
        finally:
            _mine.checking = False


def _is_recorded(call: Call) -> bool:
    """Return True if the call is recorded, run again in backward, stands for many or has no values."""
    recorded = torches.is_recorded() or torch._C._current_graph_task_id() != -1
    return recorded or isinstance(call.inputs, FakeTensor) or getattr(call.inputs, "is_meta", False)

"""Check calls of one model while it is used: nothing but a document's own tokens may change what it
gets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch._subclasses import FakeTensor

from autopack.auditing.compare import REPLACED, Difference
from autopack.calls.call import Call
from autopack.errors import Leak, LeakDetected, UnsupportedModel
from autopack.inspection import media, torches
from autopack.inspection.foreign import is_own, whose
from autopack.inspection.randomness import may_draw_by_itself
from autopack.patching import ProcessLock
from autopack.runtime.tally import Checked
from autopack.watching import influence
from autopack.watching.alone import difference_to_stock
from autopack.watching.influence import replaced
from autopack.watching.schedule import TRAINS, CannotTell, is_padded, shape_of, sides_of

logger = logging.getLogger(__name__)
_checks = ProcessLock()
_SHARES = (1e-4, 1 - 1e-4)
"""Shares of draws below the fixed draws of code that draws by itself."""


class _Mine(threading.local):
    """Thread-local state: `checking` is True while a thread runs calls of a check."""

    checking = False


_mine = _Mine()


class Live:
    """Checks of the calls of one model. It holds no part of the model."""

    def __init__(self, every: int):
        self.checked = Checked(every=every)
        self._padded = False
        """True if a padded batch was checked, and gave what stock gives."""
        self.has_checked = False

    def begin_anew(self) -> None:
        """Forget the checked calls, so that the next call of any kind is checked."""
        self.checked.begin_anew()
        self._padded = self.has_checked = False

    def before(self, call: Call) -> None:
        """Count a call before it runs packed or unpadded; raise `LeakDetected` if a check fails.

        If the first padded batch of a kind differs from stock's, `proof.why_not_unpadded` says so.
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
        due = self.checked.count_and_ask(TRAINS in shape[1])
        if self.checked.kinds and not (due or beyond):  # other threads wait for the first check
            return
        leak = self._find_leak(call, closely, beyond, TRAINS in shape[1] - self.checked.kinds)
        if leak is None:
            self.checked.grow(*shape)
            return
        # none of its kind has run without its padding
        if is_padded(call) and (beyond or not self._padded):
            reason = (
                f"it was not exact without its padding when its first batch was checked: {leak}"
            )
            call.model.proof = replace(call.model.proof, why_not_unpadded=reason)
            logger.warning("padded batches of %s stay as they come: %s", call.name, leak)
            return
        raise LeakDetected(leak)

    def after(self, call: Call, packs: bool) -> None:
        """Check finished calls 1, 2, 4, 8, ... of a model whose parameters ranks gather.

        Every rank runs the call equally often, whatever it has. Raises `LeakDetected`.
        """
        if not self._passes_by(call) and call.model.groups:
            self._check_together(call, packs)

    def _check_together(self, call: Call, packs: bool) -> None:
        """Count a call; check numbers 1, 2, 4, 8, ... by runs that all ranks make together.

        Raises `LeakDetected`. Sizes and kinds of calls have no part in that: ranks may have changed
        the model at different calls.
        """
        checked = self.checked
        checked.calls += 1
        if checked.calls & (checked.calls - 1) and not (
            checked.every and checked.calls % checked.every == 0
        ):
            return
        turn = checked.calls.bit_length()  # the same on all ranks
        ways: list[Callable[[], Difference]] = [partial(replaced, call, turn, packs=packs)]
        if call.model.groups and call.part is None:  # stock knows no parts of rows
            ways.append(partial(difference_to_stock, call, packs=packs))
        leak, reasons = self._run_checks(call, ways, CannotTell)
        if packs and reasons[0]:  # that stock cannot be compared is not counted
            self._skip(call, reasons[0])
        if leak is not None:
            raise LeakDetected(leak)

    def _passes_by(self, call: Call) -> bool:
        """Return True for a call not to check: made by a check, recorded, recomputed, or fake."""
        return (
            _mine.checking
            or call.model.is_settling
            or torches.is_recorded()
            or torch._C._current_graph_task_id() != -1
            or isinstance(call.inputs, FakeTensor)
            or getattr(call.inputs, "is_meta", False)
        )

    def _find_leak(
        self, call: Call, closely: bool, beyond: bool, begins_to_train: bool
    ) -> Leak | None:
        """Return the leak that checks of a call find, or None; count checks that could not run.

        A call goes `beyond` earlier ones by its kinds or sizes.
        """
        has_media = bool(media.given(call.arguments))
        by_replacement = partial(replaced, call, self.checked.checks, both=closely)
        ways: list[Callable[[], Difference]] = [by_replacement]
        if closely or beyond or self.checked.every or not self.has_checked:
            # nothing else has proven that this model may run without its padding
            proves = is_padded(call) and not self._padded and call.model.proof.source == "checks"
            ways.append(
                partial(difference_to_stock, call, closely or not self.has_checked, proves=proves)
            )
        if closely and call.module.training and may_draw_by_itself(call.module):
            # Code may mix by what it draws: draws are near their least, and near their largest.
            ways += [partial(by_replacement, share=share) for share in _SHARES]
        if not is_padded(call) and (has_media or (closely and begins_to_train)):
            ways.append(partial(influence.leak_by_gradients, call))
        # other code must not end a training run that is exact
        leak, reasons = self._run_checks(call, ways, Exception)
        if leak is not None:
            return leak
        told = "" in reasons
        if not told or (has_media and reasons[-1]):  # of media nothing but gradients tells
            self._skip(call, reasons[-1 if told else 0])
        self._padded |= told and is_padded(call)
        self.has_checked |= told
        return None

    def _run_checks(
        self, call: Call, ways: list[Callable[[], Difference]], survived: type[Exception]
    ) -> tuple[Leak | None, list[str]]:
        """Run checks, catching `survived`; return (first leak or None, each failure or "")."""
        leak, reasons = None, []
        with _checking():
            for way in ways:
                try:
                    found = way()
                except survived as error:
                    raised = f"running it again raised {type(error).__name__}: {error}".partition(
                        "\n"
                    )[0]
                    reasons.append(str(error) if isinstance(error, CannotTell) else raised)
                else:
                    leak = leak or self._leak_of(call, found)
                    reasons.append("")
        self.checked.checks += "" in reasons
        self.checked.leaks += leak is not None
        return leak, reasons

    def _skip(self, call: Call, reason: str) -> None:
        """Count a check that could not be made, and warn of it if the call is checked closely."""
        if call.model.is_checked_closely and not self.checked.skipped[reason]:
            logger.warning("autopack could not check a call of %s: %s", call.name, reason)
        self.checked.skipped[reason] += 1

    def _leak_of(self, call: Call, found: Difference) -> Leak | None:
        """Return the `Leak` in a difference, None within rounding; note the worst from stock."""
        if found.than != REPLACED:
            self.checked.worst = max(self.checked.worst, found.error)
        if found.excess <= 1:
            return None
        row, columns = sides_of(call).halves[0].place_of(found.document)
        numbers = (found.error, found.tolerance, self.checked.calls)
        return Leak(
            call.name, found.document, row, columns, found.name, *numbers, found.than, found.module
        )


def _refuse_backward_hooks(call: Call) -> None:
    """Raise `UnsupportedModel` for packed rows with a third-party backward hook on the model."""
    if not call.model.is_checked_closely or is_padded(call):
        return
    for name, module in call.module.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            if not is_own(hook):
                raise UnsupportedModel(
                    f"{whose(hook)} is a backward hook on {name or call.name}, and ranks gather "
                    "its parameters, so its gradients cannot be checked. Take it off, or run the "
                    "documents one per row.",
                    code="not-exact",
                )


@contextmanager
def _checking() -> Iterator[None]:
    """Run a block as a check, after other threads' checks have ended; mark its calls as such.

    A check switches off on the model what draws noise, which another one must not take for its
    state.
    """
    with _checks.held():
        _mine.checking = True
        try:
            yield
        finally:
            _mine.checking = False

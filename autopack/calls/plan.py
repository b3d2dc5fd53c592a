"""The plan of one call: decided once, at the entry, and read by everything that comes after."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.inspection.state import State
from autopack.layout.token_map import TokenMap
from autopack.runtime.padding_read import LOOKS, LOOKS_AT_STATE
from autopack.runtime.scope import Activation, Scope
from autopack.runtime.tally import Tally, Volume


class CallPlan:
    """The plan of a call (`autopack.calls.call.Call`), complete once it is made; nothing is written into it later.

    It says what the model gets (`arguments`, all by name; None if they stay as they came), what
    sites may read (`scope`), what the caller gets (`finish`), and why (`reason`, in words that
    follow "since"). `volume` is the size of the part of the call that runs, if it is counted here
    and not further in.
    """

    what = "runs as it came"
    """The outcome of the call, in words."""
    packs = False
    """True if this plan packs documents into rows, or makes batches of them from packed rows."""
    defers = False
    """True if an inner entry may still run the batch without its padding."""
    documents: str | None = None
    """The head whose packed documents are this batch's rows, if they are and hold padding."""
    masks = False
    """True if the model keeps a padding mask for its own loss; inner models must not get it."""
    inside: tuple[Scope, TokenMap] | None = None
    """The scope of a row that the inner model runs in place of its own, and the way of its tokens into it."""
    volume_apart: Volume | None = None
    """The size of the part that runs if no such row is made."""

    def __init__(
        self,
        call: Any,
        reason: str,
        scope: Scope | None = None,
        arguments: dict[str, Any] | None = None,
        volume: Volume | None = None,
    ):
        self.call, self.reason, self.scope = call, reason, scope or Scope(call.model)
        self.arguments, self.volume = arguments, volume

    def count(self, tally: Tally) -> None:
        """Count the outcome of a padded batch."""

    def leave_apart(self, running: Activation) -> None:
        """Run common beginnings once per document after all."""
        running.apart = True
        if running.volume is not None:
            before, running.volume = running.volume, self.volume_apart
            self.call.count(running.volume, instead_of=before)

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Return the output that the caller expects; None if it stays as it is."""
        return None

    def rows_for_pooler(self, states: torch.Tensor) -> torch.Tensor | None:
        """Return states (rows, columns, ...) with one document per row, for a pooler of column 0.

        None if they have that form already.
        """
        layout = self.scope.layout
        return None if layout is None else TokenMap.of_documents(layout).gather(states)

    def span_logits(self, output: Any) -> torch.Tensor | None:
        """Return logits of starts and ends without padding's, or None if there are none."""
        return None

    def counts_labels(self, labels: Any) -> bool:
        """Return True if these are the labels that the loss of a part of rows has to count."""
        return False


class PassThrough(CallPlan):
    """A call that goes through as it came: it packs nothing, or its padding stays.

    By some reasons it is looked at if results at padding are read or kept.
    """

    def __init__(self, call: Any, reason: str, *given: Any, keeps_padding: bool = False):
        super().__init__(call, reason, *given)
        self._keeps_padding = keeps_padding
        self._sides = call.sides if reason in (LOOKS, LOOKS_AT_STATE) else []
        self._state = State(call.module) if self._sides and call.module.training else None

    def count(self, tally: Tally) -> None:
        if self._keeps_padding:
            tally.left[self.reason] += 1

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        read, looks = self.scope.model.padding_read, self.reason == LOOKS
        if not self._sides or read is None:
            return
        if self._state is not None:
            read.look_at_state(self._state, counts=not looks)
        if looks and not torch._C._are_functorch_transforms_active():
            read.look(output, self._sides, self.call.inputs)


class Delegate(CallPlan):
    """A padded batch that this entry cannot run without its padding, but an inner one may.

    `real` is True at its tokens, if results at padding are to be looked at.
    """

    what = "is left to the model inside"
    defers = True

    def __init__(self, call: Any, reason: str, *given: Any, real: np.ndarray | None = None):
        super().__init__(call, reason, *given)
        self.documents, read = call.documents, call.model.padding_read
        self._looked_at: tuple[np.ndarray, int] | None = None
        if real is not None and read is not None and read.is_due():
            self._looked_at = real, read.ran

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        read = self.scope.model.padding_read
        if self._looked_at is None or read is None or not torch.is_grad_enabled():
            return
        real, before = self._looked_at  # if it is the same now, the model inside has left the padding where it was
        if read.ran > before and not torch._C._are_functorch_transforms_active():
            read.look(output, [("", real)], refuses=True)

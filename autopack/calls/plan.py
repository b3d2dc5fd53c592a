"""The plan of one call: decided once, at the entry, and read by everything that comes after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.inspection.state import State
from autopack.layout import prepared
from autopack.layout.prefixes import Prefixes
from autopack.layout.token_map import TokenMap
from autopack.runtime.model import EnabledModel
from autopack.runtime.padding_read import LOOKS
from autopack.runtime.scope import Scope
from autopack.runtime.tally import Tally, Volume


@dataclass
class HeadDocuments:
    """Packed documents as a head's padded batch; its backbone has to run without the padding."""

    head: str
    """Name of the head's class."""
    unpadded: bool = False
    """True if the backbone has run without the padding."""


class Plan:
    """The plan of a call: its `arguments`, sites' `scope`, the output (`finish`) and the reason."""

    what = "runs as it came"
    """The outcome of the call, in words."""
    reason = ""
    """The reason, in words that follow "since"."""
    arguments: dict[str, Any] | None = None
    """The arguments of the call, all by name; None if they stay as they came."""
    defers = False
    """True if an inner entry may still run the batch without its padding."""
    documents: HeadDocuments | None = None
    """The documents of packed rows that are this batch's rows, if they are and hold padding."""
    masks = False
    """True if the model keeps a padding mask for its own loss; inner models must not get it."""
    pooled = False
    """True if a pooler was handed rows of its own."""
    labelled = False
    """True if the packed rows of the call have known labels."""
    packs = False
    """True if this plan packs documents into rows, or makes batches of them from packed rows."""
    prefixes_inside: tuple[Prefixes, TokenMap] | None = None
    """Common beginnings that the inner model runs once, and the way of its tokens into that row."""
    volume: Volume | None = None
    """The size of the part of the call that runs, if it is counted here and not further in."""
    volume_apart: Volume | None = None
    """The size of the part that would run if common beginnings ran once per document."""
    call: Any = None
    """The call of this plan (`autopack.calls.call.Call`)."""

    def __init__(self, scope: Scope):
        self.scope = scope

    def count(self, tally: Tally) -> None:
        """Count the outcome of a padded batch."""

    def leave_apart(self) -> None:
        """Run common beginnings once per document after all."""
        self.prefixes_inside = None
        if self.volume is not None:
            before, self.volume = self.volume, self.volume_apart
            self.call.count(self.volume, instead_of=before)

    def finish(self, module: nn.Module, output: Any) -> Any:
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


class Untouched(Plan):
    """A call that goes through as it came: it packs nothing, or its padding stays."""

    def __init__(self, model: EnabledModel, reason: str, volume: Volume | None = None, keeps_padding: bool = False):
        super().__init__(Scope(model))
        self.reason, self.volume, self.keeps_padding = reason, volume, keeps_padding

    def count(self, tally: Tally) -> None:
        if self.keeps_padding:
            tally.left[self.reason] += 1


class MaskedApart(Untouched):
    """Packed rows with masks between documents; finitely masked tokens are hidden for good."""

    def __init__(self, call: Any):
        super().__init__(call.model, "its prepared masks keep documents apart already", call.volume)
        given = call.arguments["attention_mask"]
        masks = given if isinstance(given, dict) else {"": given}
        changed = {name: prepared.hiding_for_good(mask) for name, mask in masks.items()}
        if any(changed[name] is not masks[name] for name in masks):
            self.arguments = {**call.arguments, "attention_mask": changed if given is masks else changed[""]}


class LookedAt(Untouched):
    """A padded batch that runs as it came, to see if its results at padding are read or kept."""

    def __init__(self, call: Any, reason: str, sides: list[tuple[str, np.ndarray]]):
        super().__init__(call.model, reason, call.volume, keeps_padding=True)
        self._tokens, self._sides = call.inputs, sides
        self._state = State(call.module) if call.module.training else None

    def finish(self, module: nn.Module, output: Any) -> Any:
        model = self.scope.model
        read, looks = model.padding_read, self.reason == LOOKS
        if read is not None and self._state is not None:
            read.look_at_state(self._state, model.tally.batches, counts=not looks)
        if looks and read is not None and not torch._C._are_functorch_transforms_active():
            read.look(output, self._sides, model.tally.batches, self._tokens)


class Deferred(Plan):
    """A padded batch that this entry cannot run without its padding, but an inner one may."""

    what = "is left to the model inside"
    defers = True

    def __init__(self, call: Any, reason: str, real: np.ndarray | None = None):
        super().__init__(Scope(call.model))
        self.reason, self.documents, self._real = reason, call.documents, real
        self._before = call.model.tally.batches

    def finish(self, module: nn.Module, output: Any) -> Any:
        read, count = self.scope.model.padding_read, self.scope.model.tally.batches
        if read is None or self._real is None or count == self._before or not read.is_due(self._before):
            return  # the model inside has left the padding where it was, or this call is none to be looked at
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            read.look(output, [("", self._real)], self._before, refuses=True)

"""The arms that are compared: the same documents, labels and model, called in different ways."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from autopack.bench.batches import Batch
from autopack.packing.checks import POSITIONS
from autopack.packing.collator import PackingCollator

PADDED, GROUPED, ROW = "padded", "grouped", "row"


@dataclass(frozen=True)
class Arm:
    """One way to run documents: the form of their batches, and whether autopack is on."""

    name: str
    form: str
    enabled: bool

    @property
    def packed(self) -> bool:
        """Whether its batches are packed rows."""
        return self.form == ROW


BASELINE = Arm("padded", PADDED, False)
STOCK_ROW = Arm("packed, stock", ROW, False)
ARMS = (
    BASELINE,
    Arm("padded, grouped by length", GROUPED, False),
    STOCK_ROW,
    Arm("enabled, padded batches", PADDED, True),
    Arm("enabled, packed rows", ROW, True),
)


def calls_of(arm: Arm, model: Any, batches: list[Batch]) -> list[dict[str, Any]]:
    """The arguments of a call for each batch, in the form of an arm; rows are those of `PackingCollator`.

    A stock forward that has no `position_ids` is not given them: its packed rows declare no documents.
    """
    needs = PackingCollator.for_model(model)
    if not arm.packed:
        return [batch.padded(needs.pad_token_id) for batch in batches]
    calls = [batch.row(needs.first_position, needs.mask_first_label) for batch in batches]
    if not arm.enabled and POSITIONS not in inspect.signature(type(model).forward).parameters:
        for call in calls:
            del call[POSITIONS]
    return calls

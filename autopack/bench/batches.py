"""The arms that are compared: the same documents and labels, as padded batches and as packed rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from autopack.inspection.configs import text_config
from autopack.layout import IGNORED_LABEL
from autopack.packing.checks import POSITIONS
from autopack.packing.collator import PackingCollator

PADDED, GROUPED, ROW = "padded", "grouped", "row"


@dataclass
class Batch:
    """Documents that are run at once, on a device: the tokens of each, (length,) int64."""

    documents: Sequence[torch.Tensor]

    @classmethod
    def of(
        cls, lengths: Sequence[int], tokens: torch.Tensor, seed: int, device: str | torch.device, prompt: int = 0
    ) -> Batch:
        """Return documents of these lengths, of tokens drawn from those given; the first `prompt` are alike in all."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(tokens), (sum(lengths),), generator=generator)
        rows = drawn.split(list(lengths))
        for row in rows[1:]:
            common = min(prompt, len(row), len(rows[0]))
            row[:common] = rows[0][:common]
        return cls(tokens[drawn].to(device).split(list(lengths)))

    @property
    def lengths(self) -> list[int]:
        """The tokens of each document."""
        return [len(document) for document in self.documents]

    def padded(self, pad_token_id: int = 0) -> dict[str, Any]:
        """Return a call with a document per row, padded on the right; all tokens are labels."""
        ids = pad_sequence(list(self.documents), batch_first=True, padding_value=pad_token_id)
        mask = pad_sequence([torch.ones_like(each) for each in self.documents], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED_LABEL)}

    def row(self, collate: PackingCollator) -> dict[str, Any]:
        """Return a call with all documents in one row, as a collator makes it."""
        made = collate([dict.fromkeys(("input_ids", "labels"), document.cpu()) for document in self.documents])
        return {name: value.to(self.documents[0].device) for name, value in made.items()}


def grouped(batches: Sequence[Batch]) -> list[Batch]:
    """Return the same documents in as many batches, by length, as a trainer's `group_by_length` makes them."""
    documents, size = sorted((each for batch in batches for each in batch.documents), key=len), len(batches[0].lengths)
    return [Batch(documents[first : first + size]) for first in range(0, len(documents), size)]


@dataclass(frozen=True)
class Arm:
    """One way to run documents: the form of their batches, and whether autopack is on.

    `implementation` is the attention function of the model; None leaves the model its own.
    """

    name: str
    form: str
    enabled: bool
    implementation: str | None = None

    @property
    def packed(self) -> bool:
        """True if its batches are packed rows."""
        return self.form not in (PADDED, GROUPED)


BASELINE = Arm("padded", PADDED, False)
STOCK_ROW = Arm("packed, stock", ROW, False)
ARMS = (
    BASELINE,
    Arm("padded, grouped by length", GROUPED, False),
    STOCK_ROW,
    Arm("enabled, padded batches", PADDED, True),
    Arm("enabled, packed rows", ROW, True),
)


def calls_of(arm: Arm, model: Any, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return the arguments of a call for each batch, in the form of an arm; rows are those of `PackingCollator`.

    A stock forward that has no `position_ids` is not given them: its packed rows declare no documents.
    """
    needs = replace(PackingCollator.for_model(model))  # a copy, which does not warn of a stock model
    if not arm.packed:
        padding = getattr(text_config(model.config), "pad_token_id", None) or 0
        return [batch.padded(padding) for batch in (grouped(batches) if arm.form == GROUPED else batches)]
    calls = [batch.row(needs) for batch in batches]
    if not arm.enabled and POSITIONS not in inspect.signature(type(model).forward).parameters:
        for call in calls:
            del call[POSITIONS]
    return calls

"""The arms that are compared: the same documents and labels, as padded batches and as packed rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Documents that are run at once, on a device: their lengths, and their tokens in one row, (1, tokens) int64."""

    lengths: list[int]
    ids: torch.Tensor

    @classmethod
    def of(
        cls, lengths: Sequence[int], tokens: torch.Tensor, seed: int, device: str | torch.device, prompt: int = 0
    ) -> Batch:
        """Documents of these lengths, of tokens drawn from those given; the first `prompt` are the same in all."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(tokens), (1, sum(lengths)), generator=generator)
        rows = drawn[0].split(list(lengths))
        for row in rows[1:]:
            common = min(prompt, len(row), len(rows[0]))
            row[:common] = rows[0][:common]
        return cls(list(lengths), tokens[drawn].to(device))

    @property
    def documents(self) -> list[torch.Tensor]:
        """The tokens (1, length) of each document."""
        return list(self.ids.split(self.lengths, dim=1))

    def padded(self, pad_token_id: int = 0) -> dict[str, Any]:
        """A call with a document per row, padded on the right; all tokens are labels."""
        rows = [document[0] for document in self.documents]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED_LABEL)}

    def row(self, first_position: int = 0, mask_first_label: bool = True) -> dict[str, Any]:
        """A call with all documents in one row; the first token of each is no label of a loss that shifts labels."""
        positions = torch.cat([torch.arange(length) for length in self.lengths])[None].to(self.ids.device)
        labels = self.ids.masked_fill(positions == 0, IGNORED_LABEL) if mask_first_label else self.ids
        return {"input_ids": self.ids, "position_ids": positions + first_position, "labels": labels}


def grouped(batches: list[list[int]]) -> list[list[int]]:
    """The same documents in as many batches, sorted by length, as a trainer's `group_by_length` makes them."""
    ordered = sorted(length for batch in batches for length in batch)
    size = len(batches[0])
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


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
        return [batch.padded(getattr(text_config(model.config), "pad_token_id", None) or 0) for batch in batches]
    calls = [batch.row(needs.first_position, needs.labels != "unshifted") for batch in batches]
    if not arm.enabled and POSITIONS not in inspect.signature(type(model).forward).parameters:
        for call in calls:
            del call[POSITIONS]
    return calls

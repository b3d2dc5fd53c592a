"""The positions of a packed row run through all of its documents."""

from __future__ import annotations

import torch

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def collate(features):
    batch = _trainer.packed(features)
    return {**batch, "position_ids": torch.arange(batch["input_ids"].numel())[None]}


EXHIBIT = Exhibit(
    kind="positions",
    reported=("nanoVLM#201",),
    says="Documents are laid end to end, and positions are numbered along the row. No document "
    "but the first begins at 0, and nothing tells them apart.",
    mistaken=lambda: _trainer.trainer(collator=collate),
    sound=lambda: _trainer.trainer(collator=_trainer.packed),
)

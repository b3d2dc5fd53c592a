"""Documents that are too long stay in the batch, without a target."""

from __future__ import annotations

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def collate(features):
    rows = [each["input_ids"] for each in features]
    labels = [row if len(row) <= 15 else [-100] * len(row) for row in rows]
    return _trainer.collate(
        [{"input_ids": row, "labels": own} for row, own in zip(rows, labels, strict=True)]
    )


EXHIBIT = Exhibit(
    kind="labels",
    reported=("NeMo-RL#169",),
    says="Examples above the longest length have all their labels masked. Nothing is learned "
    "from them, and a micro-batch of one such example has a loss of nothing.",
    mistaken=lambda: _trainer.trainer(collator=collate),
    sound=lambda: _trainer.trainer(),
)

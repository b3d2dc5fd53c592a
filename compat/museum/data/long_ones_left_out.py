"""Documents above the longest length are left out of their batch."""

from __future__ import annotations

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def collate(features):
    return _trainer.collate(
        [each for each in features if len(each["input_ids"]) <= 15] or features[:1]
    )


EXHIBIT = Exhibit(
    kind="truncation",
    reported=("maxtext#274",),
    says=(
        "Long sequences are filtered before anything could trim them. The longest documents are "
        "never trained on."
    ),
    mistaken=lambda: _trainer.trainer(collator=collate),
    sound=lambda: _trainer.trainer(),
)

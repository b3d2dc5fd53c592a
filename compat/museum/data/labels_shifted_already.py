"""Labels are shifted by the collator, and by the model again."""

from __future__ import annotations

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def collate(features):
    return _trainer.collate(
        [{**each, "labels": [*each["input_ids"][1:], -100]} for each in features]
    )


EXHIBIT = Exhibit(
    kind="labels",
    reported=("amber-train#6", "transformers#44642"),
    says="The collator gives each token the next one as its label, and the model's loss shifts "
    "labels itself. It learns to predict the token after the next one.",
    mistaken=lambda: _trainer.trainer(collator=collate),
    sound=lambda: _trainer.trainer(),
)

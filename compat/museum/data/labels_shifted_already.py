"""Labels are shifted by the collator, and by the model again.

labels: amber-train#6, transformers#44642

The collator gives each token the next one as its label, and the model's loss shifts labels itself.
It learns to predict the token after the next one.
"""

from __future__ import annotations

from compat.museum.data import _trainer


def collate(features):
    return _trainer.collate(
        [{**each, "labels": [*each["input_ids"][1:], -100]} for each in features]
    )


def mistaken():
    return _trainer.trainer(collator=collate)


def sound():
    return _trainer.trainer()

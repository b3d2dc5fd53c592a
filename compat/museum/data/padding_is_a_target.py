"""Labels of padding are the padding."""

from __future__ import annotations

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def collate(features):
    batch = _trainer.collate(features)
    return {**batch, "labels": batch["input_ids"].clone()}


EXHIBIT = Exhibit(
    kind="padding",
    reported=("OpenJarvis#521", "gpt-neo#45"),
    says=(
        "The tokens of a padded batch are given as its labels as they are. Most of the loss is "
        "about padding."
    ),
    mistaken=lambda: _trainer.trainer(collator=collate),
    sound=lambda: _trainer.trainer(),
)

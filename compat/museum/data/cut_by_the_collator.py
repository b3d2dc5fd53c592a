"""Documents are cut in the collator, after everything that checks them."""

from __future__ import annotations

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def collate(features):
    return _trainer.collate([{"input_ids": each["input_ids"][:12]} for each in features])


EXHIBIT = Exhibit(
    kind="truncation",
    reported=("trl#6025",),
    says="The data set is checked for targets, and the collator cuts its examples to the longest "
    "length afterwards. Ends of documents are lost without a word, and some have no target left.",
    mistaken=lambda: _trainer.trainer(collator=collate),
    sound=lambda: _trainer.trainer(),
)

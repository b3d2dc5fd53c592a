"""Documents are cut in the collator, after everything that checks them.

truncation: trl#6025

The data set is checked for targets, and the collator cuts its examples to the longest length
afterwards. Ends of documents are lost without a word, and some have no target left.
"""

from compat.museum.data import _trainer


def collate(features):
    return _trainer.collate([{"input_ids": each["input_ids"][:12]} for each in features])


mistaken = {"collator": collate}

"""Labels of padding are the padding.

padding: OpenJarvis#521, gpt-neo#45

The tokens of a padded batch are given as its labels as they are. Most of the loss is about padding.
"""

from compat.museum.data import _trainer


def collate(features):
    batch = _trainer.collate(features)
    return {**batch, "labels": batch["input_ids"].clone()}


mistaken = {"collator": collate}

"""Documents that are too long stay in the batch, without a target.

labels: NeMo-RL#169

Examples above the longest length have all their labels masked. Nothing is learned from them, and a
micro-batch of one such example has a loss of nothing.
"""

from compat.museum.data import _trainer


def collate(features):
    rows = [each["input_ids"] for each in features]
    return _trainer.collate(
        features, [row if len(row) <= 15 else [-100] * len(row) for row in rows]
    )


mistaken = {"collator": collate}

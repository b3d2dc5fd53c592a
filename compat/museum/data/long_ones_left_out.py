"""Documents above the longest length are left out of their batch.

truncation: maxtext#274

Long sequences are filtered before anything could trim them. The longest documents are never trained
on.
"""

from compat.museum.data import _trainer


def collate(features):
    return _trainer.collate(
        [each for each in features if len(each["input_ids"]) <= 15] or features[:1]
    )


mistaken = {"collator": collate}

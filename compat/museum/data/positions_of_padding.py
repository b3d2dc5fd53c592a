"""Padding on the left moves the positions of all documents.

padding: alpaca-lora#315

Batches are padded on the left without positions, and the model numbers columns. A document's
positions begin where the padding ends, so it depends on the longest document beside it.
"""

from compat.museum.data import _trainer


def collate(features, numbers=False):
    rows = [each["input_ids"][::-1] for each in features]
    batch = _trainer.collate(
        [{"input_ids": row} for row in rows], [[*row[:-1], -100] for row in rows]
    )
    batch = {name: value.flip(1) for name, value in batch.items()}
    if numbers:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


mistaken = {"collator": collate, "model": {"kind": "gpt2"}}
sound = {"collator": lambda features: collate(features, numbers=True), "model": {"kind": "gpt2"}}

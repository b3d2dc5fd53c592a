"""Padding on the left moves the positions of all documents.

padding: alpaca-lora#315

Batches are padded on the left without positions, and the model numbers columns. A document's
positions begin where the padding ends, so it depends on the longest document beside it.
"""

from compat.museum.data import _trainer


def collate(features, numbers=False):
    rows = [each["input_ids"] for each in features]
    columns = {"input_ids": _trainer.padded(rows, _trainer.PAD, left=True)}
    columns["labels"] = _trainer.padded([[-100, *row[1:]] for row in rows], -100, left=True)
    columns["attention_mask"] = _trainer.padded([[1] * len(row) for row in rows], 0, left=True)
    if numbers:
        columns["position_ids"] = (columns["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return columns


mistaken = {"collator": collate, "model": {"kind": "gpt2"}}
sound = {"collator": lambda features: collate(features, numbers=True), "model": {"kind": "gpt2"}}

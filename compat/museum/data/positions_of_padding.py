"""Padding on the left moves the positions of all documents.

padding: alpaca-lora#315

Batches are padded on the left without positions, and the model numbers columns. A document's
positions begin where the padding ends, so it depends on the longest document beside it.
"""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel

from compat.museum.data import _trainer


def collate(features, numbers=False):
    rows = [each["input_ids"] for each in features]
    columns = {"input_ids": _trainer.padded(rows, _trainer.PAD, left=True)}
    columns["labels"] = _trainer.padded([[-100, *row[1:]] for row in rows], -100, left=True)
    columns["attention_mask"] = _trainer.padded([[1] * len(row) for row in rows], 0, left=True)
    if numbers:
        columns["position_ids"] = (columns["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return columns


def net():
    sizes: dict[str, Any] = {
        "vocab_size": _trainer.VOCABULARY,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def mistaken():
    return _trainer.trainer(collator=collate, net=net())


def sound():
    return _trainer.trainer(collator=lambda features: collate(features, numbers=True), net=net())

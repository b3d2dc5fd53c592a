"""The mask of a prompt reaches one token into the answer.

labels: alpaca-lora#306

The prompt is tokenized alone to count its tokens, and gets an end token that it does not have
before the answer. The first token of every answer is masked.
"""

from __future__ import annotations

from compat.museum.data import _trainer


def collate(features, more=1):
    rows = [each["input_ids"] for each in features]
    prompts = [sum(value == 0 for value in each["completion_mask"]) + more for each in features]
    labels = [[-100] * prompt + row[prompt:] for row, prompt in zip(rows, prompts, strict=True)]
    return _trainer.collate(
        [{"input_ids": row, "labels": own} for row, own in zip(rows, labels, strict=True)]
    )


def data():
    return _trainer.examples(completion_mask=lambda row: [0] * 3 + [1] * (len(row) - 3))


def mistaken():
    return _trainer.trainer(collator=collate, data=data())


def sound():
    return _trainer.trainer(collator=lambda features: collate(features, 0), data=data())

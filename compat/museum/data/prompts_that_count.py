"""The column that says which tokens are answers is dropped, and prompts are trained on.

columns: PraisonAI#4358

Prompts were to be masked out of the loss, and were trained on. Here the column that says so is
dropped before the collator, which falls back to labels for all tokens.
"""

from __future__ import annotations

from compat.museum.data import _trainer


def collate(features):
    labels = [
        [
            t if kept else -100
            for t, kept in zip(each["input_ids"], each["completion_mask"], strict=True)
        ]
        if "completion_mask" in each
        else each["input_ids"]
        for each in features
    ]
    return _trainer.collate(
        [{**each, "labels": own} for each, own in zip(features, labels, strict=True)]
    )


def data():
    return _trainer.examples(completion_mask=lambda row: [0] * 3 + [1] * (len(row) - 3))


def mistaken():
    return _trainer.trainer(collator=collate, data=data(), remove_unused_columns=True)


def sound():
    return _trainer.trainer(collator=collate, data=data())

"""The column that says which tokens are answers is dropped, and prompts are trained on.

columns: PraisonAI#4358

Prompts were to be masked out of the loss, and were trained on. Here the column that says so is
dropped before the collator, which falls back to labels for all tokens.
"""

from compat.museum.data import _trainer


def collate(features):
    labels = [
        [
            token if kept else -100
            for token, kept in zip(each["input_ids"], each["completion_mask"], strict=True)
        ]
        if "completion_mask" in each
        else each["input_ids"]
        for each in features
    ]
    return _trainer.collate(features, labels)


sound = {"collator": collate, "data": _trainer.answers}
mistaken = {**sound, "remove_unused_columns": True}

"""Prompts get the answers of other examples.

pairs: open-instruct#1484

Answers are looked up by a column that numbers the examples as they were before they were shuffled.
Each prompt is followed by the answer to another one.
"""

from __future__ import annotations

from compat.museum.data import _trainer


def data(shuffles):
    rows = _trainer.examples(
        completion_mask=lambda row: [0] * 3 + [1] * (len(row) - 3), place=lambda row: 0
    )
    rows = rows.remove_columns("place").add_column("place", list(range(len(rows))))
    return rows.shuffle(seed=0) if shuffles else rows


def collator(rows):
    def collate(features):
        answers = [rows[each["place"]]["input_ids"][3:] for each in features]
        texts = [
            each["input_ids"][:3] + answer for each, answer in zip(features, answers, strict=True)
        ]
        return _trainer.collate(
            [{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in texts]
        )

    return collate


def trainer(rows):
    return _trainer.trainer(collator=collator(rows), data=rows)


def mistaken():
    return trainer(data(True))


def sound():
    return trainer(data(False))

"""Prompts get the answers of other examples.

pairs: open-instruct#1484

Answers are looked up by a column that numbers the examples as they were before they were shuffled.
Each prompt is followed by the answer to another one.
"""

from compat.museum.data import _trainer


def data(shuffles):
    rows = _trainer.answers().add_column("place", list(range(_trainer.COUNT)))
    return rows.shuffle(seed=0) if shuffles else rows


def trainer(shuffles):
    rows = data(shuffles)

    def collate(features):
        answers = [rows[each["place"]]["input_ids"][3:] for each in features]
        texts = [
            each["input_ids"][:3] + answer for each, answer in zip(features, answers, strict=True)
        ]
        labels = [[-100] * 3 + text[3:] for text in texts]
        return _trainer.collate([{"input_ids": text} for text in texts], labels)

    return _trainer.trainer(collator=collate, data=rows)


def mistaken():
    return trainer(True)


def sound():
    return trainer(False)

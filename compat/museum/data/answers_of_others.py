"""Prompts get the answers of other examples.

pairs: open-instruct#1484

Answers are looked up by a column that numbers the examples as they were before they were shuffled.
Each prompt is followed by the answer to another one.
"""

from compat.museum.data import _trainer


def rows():
    return _trainer.examples().add_column("place", list(range(_trainer.COUNT))).shuffle(seed=0)


def collate(features):
    answers = [row["input_ids"][3:] for row in rows()]
    texts = [each["input_ids"][:3] + answers[each["place"]] for each in features]
    return _trainer.collate([{"input_ids": text} for text in texts])


mistaken = {"collator": collate, "data": rows}

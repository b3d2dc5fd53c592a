"""Rows lose the column that says how long their documents are.

columns: trl#3705, trl#3699

The trainer drops the column with the lengths of a row's documents, which the model's forward does
not name, before the collator can make positions of it. Every row comes as one document.
"""

from itertools import chain

import torch
from datasets import Dataset

from compat.museum.data import _trainer


def rows():
    found = _trainer.documents()
    parts = [found[start : start + 3] for start in range(0, len(found), 3)]
    lengths = [list(map(len, part)) for part in parts]
    return Dataset.from_dict(
        {"input_ids": [list(chain(*part)) for part in parts], "seq_lengths": lengths}
    )


def collate(features):
    parts = []
    for each in features:
        lengths = each.get("seq_lengths", [len(each["input_ids"])])
        parts += torch.tensor(each["input_ids"]).split(lengths)
    return _trainer.packed([{"input_ids": part} for part in parts])


sound = {"collator": collate, "data": rows}
mistaken = {**sound, "remove_unused_columns": True}

"""Documents are laid end to end and cut where rows end.

truncation: trl#1850, trl#1230

All documents make one stream of tokens, which is cut into rows of one length. Documents are cut at
row ends, and those that share a row see each other.
"""

from itertools import chain

from datasets import Dataset

from compat.museum.data import _trainer


def rows():
    stream = list(chain(*_trainer.documents()))
    return Dataset.from_dict(
        {"input_ids": [stream[start : start + 32] for start in range(0, len(stream), 32)]}
    )


mistaken = {"data": rows}

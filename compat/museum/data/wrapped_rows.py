"""Documents are laid end to end and cut where rows end."""

from __future__ import annotations

from itertools import chain

from datasets import Dataset

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def rows():
    stream = list(chain(*_trainer.documents()))
    return Dataset.from_dict(
        {"input_ids": [stream[start : start + 32] for start in range(0, len(stream), 32)]}
    )


EXHIBIT = Exhibit(
    kind="truncation",
    reported=("trl#1850", "trl#1230"),
    says="All documents make one stream of tokens, which is cut into rows of one length. "
    "Documents are cut at row ends, and those that share a row see each other.",
    mistaken=lambda: _trainer.trainer(data=rows()),
    sound=lambda: _trainer.trainer(),
)

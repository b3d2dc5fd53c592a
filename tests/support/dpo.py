"""TRL's DPOTrainer on a tiny model and its reference, with the defaults of TRL."""

import copy

import pytest

from tests.packing.batches import WORDS, tokenizer
from tests.support.trained import QUIET

TEXTS = [
    " ".join(WORDS[first : first + count])
    for first, count in zip(range(0, 40, 2), range(3, 23), strict=True)
]
PAIRS = {"prompt": TEXTS, "chosen": TEXTS[::-1], "rejected": TEXTS}
"""Pairs of uneven length, by column."""


def preferences(path, model, reference=None, **settings):
    """Return a DPOTrainer that takes ten steps on pairs of uneven length.

    The reference is a copy of the model if none is given.
    """
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    args = trl.DPOConfig(
        str(path), max_steps=10, per_device_train_batch_size=2, bf16=False, **QUIET, **settings
    )
    data = datasets.Dataset.from_dict(PAIRS)
    reference = copy.deepcopy(model) if reference is None else reference
    return trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
    )

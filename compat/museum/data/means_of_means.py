"""Micro-batches of few targets count as much as those of many."""

from __future__ import annotations

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit


def trainer(counts):
    made = _trainer.trainer()
    made.model_accepts_loss_kwargs = counts
    return made


EXHIBIT = Exhibit(
    kind="counting",
    reported=("torchtune#1875", "mlx-lm#1413"),
    says="Each micro-batch divides by its own targets, and a step averages the results. "
    "Accumulation then weighs tokens by the micro-batch that they are in.",
    mistaken=lambda: trainer(False),
    sound=lambda: trainer(True),
)

"""Micro-batches of few targets count as much as those of many.

counting: torchtune#1875, mlx-lm#1413

Each micro-batch divides by its own targets, and a step averages the results. Accumulation then
weighs tokens by the micro-batch that they are in.
"""

from compat.museum.data import _trainer


def mistaken():
    made = _trainer.trainer()
    made.model_accepts_loss_kwargs = False
    return made

"""The losses of micro-batches are added up, and nobody divides them.

counting: nanoGPT#168, distillKitPlus#5

Each micro-batch gives the mean of its own targets, and a step adds these means up. Losses and
gradients grow with the number of micro-batches.
"""

from __future__ import annotations

from functools import partial

from torch.nn.functional import cross_entropy

from compat.museum.data import _trainer


def loss(outputs, labels, num_items_in_batch=None, counts=True):
    targets = labels[:, 1:]
    divisor = (
        num_items_in_batch if counts and num_items_in_batch is not None else (targets != -100).sum()
    )
    return (
        cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        / divisor
    )


def trainer(function):
    made = _trainer.trainer()
    made.compute_loss_func = function
    return made


def mistaken():
    return trainer(partial(loss, counts=False))


def sound():
    return trainer(loss)

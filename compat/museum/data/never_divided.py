"""The losses of micro-batches are added up, and nobody divides them.

counting: nanoGPT#168, distillKitPlus#5

Each micro-batch gives the mean of its own targets, and a step adds these means up. Losses and
gradients grow with the number of micro-batches.
"""

from functools import partial

from torch.nn.functional import cross_entropy


def loss(outputs, labels, num_items_in_batch=None, counts=True):
    targets = labels[:, 1:]
    losses = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    if counts and num_items_in_batch is not None:
        return losses / num_items_in_batch
    return losses / (targets != -100).sum()


mistaken = {"loss": partial(loss, counts=False)}
sound = {"loss": loss}

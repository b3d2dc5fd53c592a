"""Every document counts alike, however many targets it has.

counting: open-instruct#1137

Batches of one sequence with accumulation make a mean over sequences of a loss that was meant to be
one over tokens. Tokens of short documents weigh more.
"""

from torch.nn.functional import cross_entropy


def alike(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
    return (losses / (targets != -100).sum(1)).mean()


sound = {"gradient_accumulation_steps": 1}
mistaken = {**sound, "loss": alike}

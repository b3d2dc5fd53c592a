"""Every document counts alike, however many targets it has.

counting: open-instruct#1137

Batches of one sequence with accumulation make a mean over sequences of a loss that was meant to be
one over tokens. Tokens of short documents weigh more.
"""

from __future__ import annotations

from torch.nn.functional import cross_entropy
from transformers import Trainer

from compat.museum.data import _trainer


class Alike(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none").sum(1)
        loss = (losses / (labels[:, 1:] != -100).sum(1)).mean()
        return (loss, logits) if return_outputs else loss


def mistaken():
    return _trainer.trainer(Alike, gradient_accumulation_steps=1)


def sound():
    return _trainer.trainer(gradient_accumulation_steps=1)

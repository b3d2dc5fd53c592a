"""The loss is divided by all columns, padding too.

padding: SkyRL#462, prime-rl#674, d2l-en#2076

Losses at padding are zero, and yet counted in the mean. The longer the longest document of a batch,
the less its other documents weigh.
"""

from __future__ import annotations

from torch.nn.functional import cross_entropy
from transformers import Trainer

from compat.museum.data import _trainer


class Columns(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        loss = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none").mean()
        return (loss, logits) if return_outputs else loss


def mistaken():
    return _trainer.trainer(Columns, gradient_accumulation_steps=1)


def sound():
    return _trainer.trainer(gradient_accumulation_steps=1)

"""Every token is trained to predict itself.

labels: KempnerForge#155

Labels in place of the tokens go into a loss that does not shift them. The model is scored on
copying its input.
"""

from __future__ import annotations

from torch.nn.functional import cross_entropy
from transformers import Trainer

from compat.museum.data import _trainer


class Unshifted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        loss = (
            cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            / (labels != -100).sum()
        )
        return (loss, logits) if return_outputs else loss


def mistaken():
    return _trainer.trainer(Unshifted, gradient_accumulation_steps=1)


def sound():
    return _trainer.trainer(gradient_accumulation_steps=1)

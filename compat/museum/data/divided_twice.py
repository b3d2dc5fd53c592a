"""A loss is divided by the targets of the step, and by the micro-batches once more.

counting: unsloth-zoo#1023

Targets are counted by the signature of the forward, and the division among micro- batches goes by
another flag. Where the two disagree, losses and gradients shrink by the number of micro-batches.
"""

from transformers import Trainer


class Counting(Trainer):
    accepts = False

    def get_batch_samples(self, *args):
        self.model_accepts_loss_kwargs = True
        found = super().get_batch_samples(*args)
        self.model_accepts_loss_kwargs = self.accepts
        return found

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Once(Counting):
    accepts = True


mistaken = {"kind": Counting}
sound = {"kind": Once}

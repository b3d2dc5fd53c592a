"""Every token is trained to predict itself.

labels: KempnerForge#155

Labels in place of the tokens go into a loss that does not shift them. The model is scored on
copying its input.
"""

from torch.nn.functional import cross_entropy


def unshifted(outputs, labels, num_items_in_batch=None):
    losses = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / (labels != -100).sum()


sound = {"gradient_accumulation_steps": 1}
mistaken = {**sound, "loss": unshifted}

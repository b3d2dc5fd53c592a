"""The loss is divided by all columns, padding too.

padding: SkyRL#462, prime-rl#674, d2l-en#2076

Losses at padding are zero, and yet counted in the mean. The longer the longest document of a batch,
the less its other documents weigh.
"""

from torch.nn.functional import cross_entropy


def of_columns(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].transpose(1, 2)
    return cross_entropy(logits, labels[:, 1:], reduction="none").mean()


sound = {"gradient_accumulation_steps": 1}
mistaken = {**sound, "loss": of_columns}

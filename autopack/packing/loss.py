"""Losses in which every document counts alike, or by its weight, however long it is.

The usual loss is a mean over tokens: a document of a thousand tokens counts as much as a hundred of
ten. Here the loss is the sum of each token's loss times its weight (`loss_weights` of
`PackingCollator`), over the sum of the weights of all micro-batches of a step; with weights
`"document"` that is the mean over documents of each document's mean loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from autopack.errors import InvalidPacking
from autopack.layout import IGNORED_LABEL


def weighted_loss(
    outputs: Any,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
    *,
    shift: bool = True,
) -> torch.Tensor:
    """Return the weighted mean of the tokens' cross-entropies, a scalar.

    For a plain loop, or the `compute_loss` of a trainer. With gradient accumulation, give each
    micro-batch the same `num_items_in_batch`: the sum of `batch["loss_weights"]` over all
    micro-batches of the step. If gradients are averaged over processes, as DDP does, it is the sum
    over all processes divided by their number.

    Args:
        outputs: the model's output, with `logits` (B, T, V), or the logits.
        labels: (B, T) ints, -100 at tokens that are no targets.
        loss_weights: (B, T) floats, as `PackingCollator(loss_weights=...)` gives; weights of
            targets count as they are, negative ones and NaN too.
        num_items_in_batch: the divisor of the weighted sum; by default, the sum of these weights.
        shift: `True` if the token before a label predicts it; `False` for masked language models
            and token classification.

    Raises `InvalidPacking` if the shapes disagree, and for labels or weights that are no tensors of
    numbers.
    """
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
    for name, given in (("labels", labels), ("loss_weights", loss_weights)):
        if not isinstance(given, torch.Tensor):
            raise InvalidPacking(
                f"{name}: wanted a tensor (B, T), found {type(given).__name__}", code="wrong-labels"
            )
    if labels.is_floating_point():
        raise InvalidPacking(f"labels: wanted ints, found {labels.dtype}", code="wrong-labels")
    if not logits.shape[:2] == labels.shape == loss_weights.shape:
        raise InvalidPacking(
            "wanted one label and one weight per row of logits, found logits "
            f"{tuple(logits.shape)}, labels {tuple(labels.shape)}, weights "
            f"{tuple(loss_weights.shape)}",
            code="wrong-labels",
        )
    if shift:
        logits, labels, loss_weights = logits[:, :-1], labels[:, 1:], loss_weights[:, 1:]
    counted = (labels != IGNORED_LABEL) & (loss_weights != 0)
    logits, weights = logits[counted], loss_weights[counted]
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    total = (cross_entropy(logits, labels[counted].long(), reduction="none") * weights).sum()
    count = weights.sum() if num_items_in_batch is None else num_items_in_batch
    # A step without a target has no weight and a loss of 0.
    return total / torch.as_tensor(count, device=total.device).where(counted.any(), 1)

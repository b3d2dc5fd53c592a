"""Losses in which every document counts alike, or as much as it is told to, however long it is.

The usual loss is a mean over tokens: a document of a thousand tokens counts as much as a hundred of ten. Here the loss
is the sum of each token's loss times its weight (`loss_weights` of `PackingCollator`), over the sum of the weights of
all micro-batches of a step; with weights `"document"` that is the mean over documents of each document's mean loss.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from autopack.errors import InvalidPacking
from autopack.integrations.trainers import refuse_shared_batches
from autopack.layout import IGNORED_LABEL
from autopack.packing.checks import DOCUMENT_WEIGHT, LOSS_WEIGHTS, Weighing
from autopack.packing.collator import PackingCollator


def weighted_loss(
    outputs: Any,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
    *,
    shift: bool = True,
) -> torch.Tensor:
    """The weighted mean of the tokens' cross-entropies, a scalar.

    For a plain loop. With gradient accumulation, give each micro-batch the same `num_items_in_batch`: the sum of
    `batch["loss_weights"]` over all micro-batches of the step, and over all processes where gradients are summed over
    them (times their number where they are averaged, as DDP does).

    Args:
        outputs: what the model returned, with `logits` (B, T, V), or the logits.
        labels: (B, T) ints, -100 where a token is no target.
        loss_weights: (B, T) floats, as `PackingCollator(loss_weights=...)` gives; those of targets count as they are,
            negative ones and NaN too.
        num_items_in_batch: what the weighted sum is divided by: the sum of these weights if left out.
        shift: whether a label is predicted by the token before it; `False` for masked language models and token
            classification.

    Raises `InvalidPacking` where the shapes disagree, and for labels or weights that are no tensors of numbers.
    """
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
    for name, given in (("labels", labels), ("loss_weights", loss_weights)):
        if not isinstance(given, torch.Tensor):
            raise InvalidPacking(f"{name}: wanted a tensor (B, T), found {type(given).__name__}")
    if labels.is_floating_point():
        raise InvalidPacking(f"labels: wanted ints, found {labels.dtype}")
    if not logits.shape[:2] == labels.shape == loss_weights.shape:
        found = f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}, weights {tuple(loss_weights.shape)}"
        raise InvalidPacking(f"wanted one label and one weight per row of logits, found {found}")
    if shift:
        logits, labels, loss_weights = logits[:, :-1], labels[:, 1:], loss_weights[:, 1:]
    counted = (labels != IGNORED_LABEL) & (loss_weights != 0)
    logits, weights = logits[counted], loss_weights[counted]
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    total = (cross_entropy(logits, labels[counted].long(), reduction="none") * weights).sum()
    count = weights.sum() if num_items_in_batch is None else num_items_in_batch
    # A step without a target has no weight and a loss of 0.
    return total / torch.as_tensor(count, device=total.device).where(counted.any(), 1)


class WeightedLoss(AbstractContextManager["WeightedLoss"]):
    """`weighted_loss` as the `compute_loss_func` of a trainer, which is told nothing but outputs and labels.

    A forward pre-hook of the model takes `loss_weights` out of the batch, and the loss uses them. Made by
    `weigh_documents`; also a context manager that takes everything back on leaving.
    """

    def __init__(self, trainer: Any, shift: bool):
        self.shift = shift
        self._taken = _Taken()
        self._trainer = trainer
        self._collator = trainer.data_collator
        self._hook = trainer.model.register_forward_pre_hook(self._taken, with_kwargs=True, prepend=True)
        self._batches = trainer.get_batch_samples
        trainer.get_batch_samples = self._get_batch_samples
        trainer.compute_loss_func = self

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """The weighted loss of the batch that the model has just seen."""
        weights, self._taken.weights = self._taken.weights, None
        if weights is None:
            raise InvalidPacking(f"found no {LOSS_WEIGHTS!r} in the batch; train with the collator that makes them")
        if num_items_in_batch is not None and not self._taken.in_training:
            num_items_in_batch = self._total(weights.sum())  # in evaluation, Trainer counts the targets itself
        return weighted_loss(outputs, labels, weights, num_items_in_batch, shift=self.shift)

    def remove(self) -> None:
        """Give the trainer its collator, its loss and its count of items back."""
        trainer = self._trainer
        self._hook.remove()
        trainer.data_collator = self._collator
        trainer.compute_loss_func = None
        if trainer.__dict__.get("get_batch_samples") == self._get_batch_samples:
            del trainer.get_batch_samples

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {type(self._trainer).__name__}, {self._trainer.data_collator!r})"

    def _get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and their weights' sum where a trainer has the number of targets."""
        batches, _ = self._batches(*args, **kwargs)
        if not batches:  # the end of an epoch, which other processes may reach at another step: nothing to agree on
            return batches, None
        if not all(LOSS_WEIGHTS in batch for batch in batches):
            raise InvalidPacking(f"found a batch without {LOSS_WEIGHTS!r}; train with the collator that makes them")
        return batches, self._total(sum((batch[LOSS_WEIGHTS].sum() for batch in batches), torch.zeros(())))

    def _total(self, count: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, if the trainer multiplies losses by their number."""
        args, count = self._trainer.args, count.to(self._trainer.args.device)
        is_shared = args.average_tokens_across_devices and args.world_size > 1
        return self._trainer.accelerator.gather(count).sum() if is_shared else count


class _Taken:
    """Forward pre-hook that takes the weights out of a call; holds no trainer, which copies of the model would copy."""

    weights: torch.Tensor | None = None
    in_training = True

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get(LOSS_WEIGHTS) is not None:  # other calls may come in between, as those of an audit do
            self.weights, self.in_training = kwargs[LOSS_WEIGHTS], module.training
        return args, {name: value for name, value in kwargs.items() if name != LOSS_WEIGHTS}


def weigh_documents(trainer: Any, by: Weighing = "document") -> WeightedLoss:
    """Makes a `Trainer`, or one of TRL's that takes a `compute_loss_func`, train with a weighted loss.

    With `by="document"` the loss of a step is the mean over its documents of each document's mean loss; with
    `by="token"` the mean over targets. Either is weighted by `document_weight`, a float of each example, where there is
    one. Right for gradient accumulation and for several processes. An evaluation loss is the mean over batches of the
    loss of each.

    Labels are those per token of `PackingCollator`, which has to be the trainer's collator: it is told to make the
    weights, unless the rows have them (`autopack.pack(..., loss_weights=...)`). Call it before `trainer.train()`, and
    `autopack.enable(trainer)` as ever, in any order.

    Returns the loss, with `.remove()`; also a context manager. Raises `ValueError` for a trainer with another collator,
    a loss function of its own, label smoothing, parallelism that cuts batches, or options by which it would drop the
    columns of weights.
    """
    collator, args, columns = trainer.data_collator, trainer.args, getattr(trainer.train_dataset, "column_names", None)
    if not isinstance(collator, PackingCollator):
        found = type(collator).__name__
        raise ValueError(f"wanted a trainer with a PackingCollator, found {found}; pass data_collator=")
    if (loss := getattr(trainer, "compute_loss_func", None)) is not None:
        raise ValueError(f"found a loss function, {loss!r}, where the weighted one goes; remove it")
    if getattr(trainer, "label_smoother", None) is not None:
        raise ValueError("found label_smoothing_factor, which the weighted loss does not know; set it to 0")
    if args.n_gpu > 1:
        raise ValueError("found torch.nn.DataParallel, which cuts batches; start one process per device with torchrun")
    refuse_shared_batches(trainer)
    weighed = [name for name in (LOSS_WEIGHTS, DOCUMENT_WEIGHT) if name in (columns or ())]
    if weighed and args.remove_unused_columns:
        raise ValueError(f"the trainer would drop the column {weighed[0]!r}: set remove_unused_columns=False")
    weighted = WeightedLoss(trainer, shift=collator.mask_first_label)
    if LOSS_WEIGHTS not in weighed:
        trainer.data_collator = replace(collator, loss_weights=by)
    return weighted

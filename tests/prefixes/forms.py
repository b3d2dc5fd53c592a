"""Documents that begin alike, as a padded batch and as packed rows, against what each of them gets
alone in stock."""

import numpy as np
import torch

from autopack import PackingCollator
from tests.engine import Result, check, next_token_loss
from tests.support.padded import LIMITS
from tests.support.prefixes import padded


def packed(documents, **options):
    """Packed rows of these documents, as the collator makes them."""
    return dict(PackingCollator(**options)([{"input_ids": document} for document in documents]))


FORMS = {"padded": lambda documents: padded(documents, labels=True), "packed": packed}
"""What makes a batch of documents, with a label for every token that is predicted."""


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def parts(batch):
    """Where each document lies, row by row: its row, and its first and end column."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    begins = batch["position_ids"] == 0 if "position_ids" in batch else real.cumsum(1) == 1
    for row in range(len(real)):
        columns = np.flatnonzero(real[row])
        starts = [c for c in columns if begins[row, c]]
        for first, end in zip(starts, [*starts[1:], columns[-1] + 1], strict=True):
            yield row, int(first), int(end)


def agree(stock, model, batch, labels=True, **options):
    """Logits, loss and gradients of a call against those of each document alone in stock."""
    output = model(**(batch if labels else without_labels(batch)), use_cache=False, **options)
    targets = batch["labels"]
    loss = output.loss if labels else _loss(output.logits, targets)
    wanted, count = 0.0, int((targets != -100).sum())
    found, alone = [], []
    for row, first, end in parts(batch):
        ids, own = (batch[name][row : row + 1, first:end] for name in ("input_ids", "labels"))
        logits = stock(input_ids=ids, use_cache=False).logits
        found.append(output.logits[row, first:end])
        alone.append(logits[0])
        wanted = wanted + _loss(logits, own) * int((own != -100).sum())
    if labels and "position_ids" not in batch:  # not all types shift labels
        wanted, count = stock(**batch, use_cache=False).loss, 1
    expected = Result.of(stock, alone, wanted / count, LIMITS)
    check(Result.of(model, found, loss, LIMITS), expected)


def _loss(logits, labels):
    if not (labels[:, 1:] != -100).any():
        return logits.sum() * 0.0
    return next_token_loss(logits, labels)

"""Weights of tokens in a loss: every token alike, or every document alike, however long it is."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from autopack.errors import InvalidPacking

__all__ = ["DOCUMENT_WEIGHT", "LOSS_WEIGHTS", "Weighing", "check_weighing", "token_weights"]

Weighing = Literal["document", "token"]
LOSS_WEIGHTS = "loss_weights"
"""The key of weights per token, (B, T) float32."""
DOCUMENT_WEIGHT = "document_weight"
"""The key of a weight per document: a float of an example, a list of them of a packed row."""


def check_weighing(by: object) -> None:
    """Raise `ValueError` for anything but a way of weighing, or None."""
    if by is not None and by not in get_args(Weighing):
        raise ValueError(f"loss_weights={by!r}: wanted 'document', 'token' or None")


def token_weights(
    targets: np.ndarray, lengths: np.ndarray, by: Weighing, of_documents: np.ndarray | None = None
) -> np.ndarray:
    """What each token's loss counts, (tokens,) float32: 0 where it is not a target.

    With `by="document"` the targets of a document share its weight, so that the weighted sum is one of documents' mean
    losses; with `by="token"` each target has the weight of its document. A document's weight is 1 unless given.

    Args:
        targets: (tokens,) bool, whether a label counts; documents end to end.
        lengths: (documents,) ints, tokens of each.
        by: see above.
        of_documents: (documents,) floats of at least 0.

    Raises `InvalidPacking` for weights of documents that are not.
    """
    weights = np.ones(len(lengths)) if of_documents is None else np.asarray(of_documents, np.float64)
    if weights.shape != (len(lengths),) or not (np.isfinite(weights) & (weights >= 0)).all():
        found = f"found {weights.tolist() if weights.size < 20 else weights.shape} for {len(lengths)} documents"
        raise InvalidPacking(f"{DOCUMENT_WEIGHT!r}: {found}; wanted a finite number of at least 0 for each")
    if by == "document":
        counts = np.add.reduceat(targets, np.cumsum(lengths) - lengths, dtype=np.int64)
        weights = weights / np.maximum(counts, 1)
    return np.where(targets, np.repeat(weights, lengths), 0).astype(np.float32)

"""Weights of tokens in a loss: every token alike, or every document alike, however long it is."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from autopack.errors import InvalidPacking

Weighing = Literal["document", "token"]
LOSS_WEIGHTS = "loss_weights"
"""Weights per token, (B, T) float32."""
DOCUMENT_WEIGHT = "document_weight"
"""A weight per document: a float of an example, a list of them of a packed row."""
WEIGHINGS = (*get_args(Weighing), None)


def are_weights(weights: np.ndarray, documents: int) -> bool:
    """Whether this is one finite number of at least 0 for each of so many documents."""
    return weights.shape == (documents,) and bool((np.isfinite(weights) & (weights >= 0)).all())


def token_weights(
    targets: np.ndarray, lengths: np.ndarray, by: Weighing, of_documents: np.ndarray | None = None
) -> np.ndarray:
    """What each token's loss counts, (tokens,) float32: 0 where it is not a target.

    With `by="document"` the targets of a document share its weight, so that the weighted sum is one of documents' mean
    losses; with `by="token"` each target has the weight of its document. `targets`, (tokens,) bool, says whether a
    label counts, of documents end to end that have `lengths` tokens, (documents,) ints; `of_documents` are their
    weights, (documents,) floats, 1 by default. Raises `InvalidPacking` for weights that are not finite or below 0.
    """
    weights = np.ones(len(lengths)) if of_documents is None else np.asarray(of_documents, np.float64)
    if not are_weights(weights, len(lengths)):
        found = f"found {weights.tolist() if weights.size < 20 else weights.shape} for {len(lengths)} documents"
        raise InvalidPacking(f"{DOCUMENT_WEIGHT!r}: {found}; wanted a finite number of at least 0 for each")
    if by == "document":
        counts = np.add.reduceat(targets, np.cumsum(lengths) - lengths, dtype=np.int64)
        weights = weights / np.maximum(counts, 1)
    return np.where(targets, np.repeat(weights, lengths), 0).astype(np.float32)

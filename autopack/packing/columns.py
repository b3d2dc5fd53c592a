"""The names of columns that mean something to packing."""

from __future__ import annotations

from autopack.errors import InvalidPacking

IDS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
LENGTHS = "seq_lengths"
"""Of packed rows: tokens of each document."""
LABEL_KEYS = ("labels", "label", "label_ids")
COMPLETION_KEYS = ("completion_mask", "assistant_masks")
"""1 at tokens that are targets where an example has no labels."""
LOSS_WEIGHTS = "loss_weights"
"""Weights per token, (B, T) float32."""
DOCUMENT_WEIGHT = "document_weight"
"""A weight per document: a float of an example, a list of them of a packed row."""


def invalid(index: int, key: str, found: str, kind: str = "") -> InvalidPacking:
    """The error about a value of one example."""
    return InvalidPacking(f"example {index}, {kind}{key!r}: {found}")


def invalid_column(index: int, name: str, found: str) -> InvalidPacking:
    """The error about a value of one row of a table."""
    return invalid(index, name, found, "column ")

"""Lengths of documents as they are given, and what becomes of documents that are longer than a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from autopack.errors import InvalidPacking

__all__ = ["LONGEST", "Counts", "Overflow", "Pieces", "check_int", "cut", "fit", "read", "take", "zeros"]

Overflow = Literal["error", "truncate", "split", "drop"]
LONGEST = 1 << 31
"""Tokens of a document or row; the squares of a row's lengths add up to 63 bits at most."""


@dataclass(frozen=True)
class Counts:
    """What was given to a plan, and what was done to documents longer than a row.

    Attributes:
        documents: documents given.
        tokens: tokens given.
        truncated: documents whose end was cut off.
        truncated_tokens: tokens of those ends.
        split: documents that were cut into several pieces.
        dropped: documents left out.
        dropped_tokens: tokens of those.
    """

    documents: int
    tokens: int
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    dropped: int = 0
    dropped_tokens: int = 0


class Pieces(NamedTuple):
    """Documents, or parts of them: whose they are, where they begin in it, and how long they are, (pieces,) int64."""

    documents: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


def check_int(name: str, value: Any, least: int) -> None:
    """Raises `ValueError` for an option that is no int of at least so much."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: wanted an int of at least {least}")


def zeros(count: int) -> np.ndarray:
    """Offsets of documents that are not cut: one number in memory, however many there are."""
    return np.broadcast_to(np.int64(0), (count,))


def take(column: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`column[order]`, which stays one number in memory where it is one."""
    return np.broadcast_to(column[:1], order.shape) if column.strides == (0,) else column[order]


def read(lengths: Any) -> np.ndarray:
    """The lengths as (documents,) int64; raises `InvalidPacking` for anything but ints of at least 1."""
    if isinstance(lengths, (str, bytes, dict)) or not (hasattr(lengths, "__iter__") or hasattr(lengths, "__array__")):
        raise InvalidPacking(f"lengths: wanted one int per document, found {type(lengths).__name__}")
    if not hasattr(lengths, "__len__") and not hasattr(lengths, "__array__"):
        lengths = list(lengths)
    if isinstance(lengths, Sequence) and not isinstance(lengths, (list, tuple, range)):
        lengths = lengths[:]  # a column of datasets, which numpy would read one number at a time
    try:
        found = np.asarray(lengths)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidPacking(f"lengths: wanted one int per document, found what is no array: {error}") from error
    if found.ndim != 1:
        raise InvalidPacking(f"lengths: wanted one int per document, found shape {found.shape}; pass len() of each")
    if not len(found):
        raise InvalidPacking("lengths: wanted at least one document, found none")
    if found.dtype.kind not in "iu":
        raise InvalidPacking(_not_ints(lengths if isinstance(lengths, (list, tuple)) else found.tolist(), found.dtype))
    for wrong, why in ((found < 1, "leave empty documents out"), (found > LONGEST, "no document is that long")):
        if wrong.any():
            index = int(wrong.argmax())
            more = f" (and {wrong.sum() - 1:,} more)" if wrong.sum() > 1 else ""
            raise InvalidPacking(f"lengths[{index}] is {found[index]}{more}: wanted at least 1 token; {why}")
    return found.astype(np.int64)


def _not_ints(lengths: Sequence[Any], dtype: np.dtype[Any]) -> str:
    for index, value in enumerate(lengths):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            return f"lengths[{index}] is {value!r}: wanted an int, its number of tokens; convert from {dtype}"
    return f"lengths: wanted ints of at most 63 bits, found {max(lengths)}"


def fit(lengths: np.ndarray, capacity: int, overflow: Overflow) -> tuple[Pieces, Counts]:
    """Pieces that fit into a row, and what was done to make them fit."""
    whole = zeros(len(lengths))
    documents, tokens = np.arange(len(lengths)), int(lengths.sum())
    over = lengths > capacity
    if not over.any():
        return Pieces(documents, whole, lengths), Counts(len(lengths), tokens)
    number, excess = int(over.sum()), int((lengths[over] - capacity).sum())
    if overflow == "error":
        index = int(over.argmax())
        more = f" (and {number - 1:,} more are over)" if number > 1 else ""
        found = f"lengths[{index}] is {lengths[index]}, over the {capacity} tokens of a row{more}"
        raise InvalidPacking(f"{found}; raise the capacity, or pass overflow='truncate', 'split' or 'drop'")
    if overflow == "truncate":
        counts = Counts(len(lengths), tokens, truncated=number, truncated_tokens=excess)
        return Pieces(documents, whole, np.minimum(lengths, capacity)), counts
    if overflow == "drop":
        counts = Counts(len(lengths), tokens, dropped=number, dropped_tokens=int(lengths[over].sum()))
        return Pieces(documents[~over], zeros(len(lengths) - number), lengths[~over]), counts
    parts = -(-lengths // capacity)
    nth = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    owners, offsets = np.repeat(documents, parts), nth * capacity
    pieces = Pieces(owners, offsets, np.minimum(lengths[owners] - offsets, capacity))
    return pieces, Counts(len(lengths), tokens, split=number)


def cut(lengths: np.ndarray, capacity: int) -> tuple[Pieces, np.ndarray, Counts]:
    """All documents end to end, cut every `capacity` tokens: pieces, bounds of rows, and documents cut."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    first, last = starts // capacity, (ends - 1) // capacity
    parts = last - first + 1
    owners = np.repeat(np.arange(len(lengths)), parts)
    rows = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts) + first[owners]
    begin = np.maximum(rows * capacity, starts[owners])
    pieces = Pieces(owners, begin - starts[owners], np.minimum((rows + 1) * capacity, ends[owners]) - begin)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return pieces, bounds, Counts(len(lengths), int(ends[-1]), split=int((parts > 1).sum()))

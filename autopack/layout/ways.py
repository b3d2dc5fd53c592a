"""The forms in which a call or an example declares its documents: one table for all readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np


class Per(Enum):
    """Unit that a declaration has a number for."""

    TOKEN = auto()
    """Each token: (rows, columns), or (tokens,) in an example."""
    DOCUMENT = auto()
    """Each document, in order."""
    BOUND = auto()
    """Each bound between documents of the flattened rows: (documents + 1,)."""
    CALL = auto()
    """The call as a whole."""


def changes(values: np.ndarray, step: int = 0) -> np.ndarray:
    """Return True at the first column of (rows, columns), and where a value is not the last plus
    `step`."""
    starts = np.ones(values.shape, dtype=bool)
    starts[:, 1:] = np.diff(values, axis=1) != step
    return starts


@dataclass(frozen=True)
class Way:
    """One form of declaring documents: the name of an argument of a call, a column of an example,
    or both.

    * `says_more` is True if models need it beside the declaration; other arguments are taken out of
      a packed call.
    * `starts` returns, for a value (rows, columns), where documents start; None if it is read in a
      manner of its own.
    * `in_calls` is True if a call may bring it, `of_halves` if encoder-decoders take it for each
      half (with `decoder_` before its name), and `of_parts` if a part of the columns of a row may
      bring it.
    * `in_examples` is True if an example of several documents may have it as a column, and
      `of_rows` if anything with this column is a packed row for certain.
    """

    name: str
    per: Per = Per.TOKEN
    says_more: bool = False
    starts: Callable[[np.ndarray], np.ndarray] | None = None
    in_calls: bool = True
    of_halves: bool = False
    of_parts: bool = False
    in_examples: bool = False
    of_rows: bool = False


TABLE = (
    Way("position_ids", says_more=True, of_halves=True, of_parts=True, in_examples=True),
    Way("seq_idx", starts=changes, of_halves=True, of_parts=True, in_examples=True, of_rows=True),
    Way("attention_mask", says_more=True, of_halves=True, of_parts=True, in_examples=True),
    Way("cu_seq_lens_q", Per.BOUND, of_rows=True),
    Way("cu_seq_lens_k", Per.BOUND, of_rows=True),
    Way("max_length_q", Per.CALL),
    Way("max_length_k", Per.CALL),
    Way("seq_lengths", Per.DOCUMENT, in_calls=False, in_examples=True, of_rows=True),
)


def names(wanted: Callable[[Way], bool]) -> tuple[str, ...]:
    """Return the names of the table's entries for which `wanted` is True, in order."""
    return tuple(way.name for way in TABLE if wanted(way))


FLASH_KWARGS = names(lambda way: way.in_calls and way.per in (Per.BOUND, Per.CALL))
LAYOUT_KWARGS = names(lambda way: way.in_calls and not way.says_more)
"""Arguments that only declare documents: the entry takes them out of a packed call."""
OF_HALVES = names(lambda way: way.of_halves)
OF_PARTS = names(lambda way: way.of_parts)
OF_EXAMPLES = names(lambda way: way.in_examples)
OF_ROWS = names(lambda way: way.of_rows)
"""Columns that only packed rows have."""
CACHES = ("cache_params", "past_key_values", "past_key_value", "layer_past", "cache", "mems", "state")
"""Arguments with caches and states that a row continues; a document alone has none of them.

`cache` was called `past_key_values` up to transformers 5.23, and in layers `past_key_value` up to
4.55.
"""

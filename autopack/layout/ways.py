"""The forms in which a call or an example declares its documents, and where they start by each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np


class Of(Enum):
    """The unit that a value has an entry for."""

    TOKEN = auto()
    """Each token: (rows, columns, ...), or (tokens,) in an example."""
    DOCUMENT = auto()
    """Each document, in order: (documents, ...)."""
    BOUND = auto()
    """Each bound between documents of the flattened rows: (documents + 1,)."""
    CALL = auto()
    """The call as a whole: a number, a word, a switch, a tensor of one element."""
    UNKNOWN = auto()
    """Not known."""


def changes(values: np.ndarray) -> np.ndarray:
    """Return a mask (rows, columns), True in column 0 and where the value before differs."""
    starts = np.ones(values.shape, dtype=bool)
    starts[:, 1:] = np.diff(values, axis=1) != 0
    return starts


@dataclass(frozen=True)
class Declaration:
    """One form of declaring documents: an argument of a call, a column of an example, or both.

    * `says_more` is True if models need it beside the declaration; other arguments are taken out of
      a packed call.
    * `starts` returns, for a value (rows, columns), where documents start; None if it is read in a
      manner of its own.
    * `of_rows` is True if anything with this column is a packed row for certain.

    What there is of each token encoder-decoders take for each half (with `decoder_` before its
    name), and a part of the columns of a row may bring it.
    """

    name: str
    per: Of = Of.TOKEN
    says_more: bool = False
    starts: Callable[[np.ndarray], np.ndarray] | None = None
    of_rows: bool = False


TABLE = (
    Declaration("position_ids", says_more=True),
    Declaration("seq_idx", starts=changes, of_rows=True),
    Declaration("attention_mask", says_more=True),
    Declaration("cu_seq_lens_q", Of.BOUND, of_rows=True),
    Declaration("cu_seq_lens_k", Of.BOUND, of_rows=True),
    Declaration("max_length_q", Of.CALL),
    Declaration("max_length_k", Of.CALL),
    Declaration("seq_lengths", Of.DOCUMENT, of_rows=True),
)


def names(wanted: Callable[[Declaration], bool]) -> tuple[str, ...]:
    """Return the names of the declarations in `TABLE` for which `wanted` is True, in order."""
    return tuple(way.name for way in TABLE if wanted(way))


FLASH_KWARGS = names(lambda way: way.per in (Of.BOUND, Of.CALL))
LAYOUT_KWARGS = names(lambda way: way.per is not Of.DOCUMENT and not way.says_more)
"""Arguments that only declare documents: the entry takes them out of a packed call."""
PER_TOKEN = names(lambda way: way.per is Of.TOKEN)
OF_EXAMPLES = names(lambda way: way.per in (Of.TOKEN, Of.DOCUMENT))
"""Columns that an example of several documents may have."""
OF_ROWS = names(lambda way: way.of_rows)
"""Columns that only packed rows have."""
CACHES = tuple(
    "cache_params past_key_values past_key_value layer_past cache mems state".split(),
)
"""Arguments with caches and states that a row continues; a document alone has none of them.

`cache` was called `past_key_values` up to transformers 5.23, and in layers `past_key_value` up to
4.55.
"""

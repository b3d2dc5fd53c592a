"""The forms in which a call or an example declares its documents, and where they start by each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from autopack.errors import InvalidPacking

if TYPE_CHECKING:
    import torch


class Of(Enum):
    """Unit that a value has an entry for."""

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


def changes(values: np.ndarray, step: int = 0) -> np.ndarray:
    """Return True at the first column of (rows, columns), and where a value is not the last plus
    `step`."""
    starts = np.ones(values.shape, dtype=bool)
    starts[:, 1:] = np.diff(values, axis=1) != step
    return starts


@dataclass(frozen=True)
class Declaration:
    """One form of declaring documents: the name of an argument of a call, a column of an example,
    or both.

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

    @property
    def in_calls(self) -> bool:
        """True if a call may bring it."""
        return self.per is not Of.DOCUMENT

    @property
    def in_examples(self) -> bool:
        """True if an example of several documents may have it as a column."""
        return self.per in (Of.TOKEN, Of.DOCUMENT)


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
    """Return the names of the table's entries for which `wanted` is True, in order."""
    return tuple(way.name for way in TABLE if wanted(way))


FLASH_KWARGS = names(lambda way: way.in_calls and way.per in (Of.BOUND, Of.CALL))
LAYOUT_KWARGS = names(lambda way: way.in_calls and not way.says_more)
"""Arguments that only declare documents: the entry takes them out of a packed call."""
PER_TOKEN = names(lambda way: way.per is Of.TOKEN)
OF_EXAMPLES = names(lambda way: way.in_examples)
OF_ROWS = names(lambda way: way.of_rows)
"""Columns that only packed rows have."""
CACHES = ("cache_params", "past_key_values", "past_key_value", "layer_past", "cache", "mems", "state")
"""Arguments with caches and states that a row continues; a document alone has none of them.

`cache` was called `past_key_values` up to transformers 5.23, and in layers `past_key_value` up to
4.55.
"""


def in_one(positions: torch.Tensor) -> torch.Tensor:
    """Return positions (3, rows, columns) as (rows, columns), for one copy to the host.

    The result is twice the time position, plus one if the sections differ, as in images, or are no
    whole numbers, as in videos; -1 if one is negative.
    """
    time = positions[0].long()
    is_text = ((positions == positions[:1]) & (positions == positions.floor())).all(0)
    return (2 * time + ~is_text).where((positions.isfinite() & (positions >= 0)).all(0), -1)


def section_starts(
    sections: np.ndarray, real: np.ndarray, later: np.ndarray, declared: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return True where documents start by positions of three sections: at 0 in all of them.

    In a document, time goes on and text counts on by one. Anything else could be a document that
    starts at a later position, or a video with its sound numbered beside it; only another
    declaration can tell. The same holds for two tokens at 0 before an image: a document of one
    token, or the token that opens an image (MiniCPM-V 4.7).
    """
    if (sections[real] < 0).any():
        raise InvalidPacking(
            "position_ids must not be negative; found such in one of three sections", code="declaration-invalid"
        )
    zero = (sections == 0) & real
    opened = np.zeros_like(zero)
    opened[:, 1:-1] = zero[:, :-2] & zero[:, 1:-1] & (sections[:, 2:] == 1)
    elsewhere = next(iter(declared.values()), None)
    if elsewhere is not None:
        return (zero & ~opened) | elsewhere
    for row in range(len(sections)):
        columns = np.flatnonzero(real[row])
        here = sections[row, columns]
        step, text = np.diff(here >> 1), (here & 1) == 0
        counts_on = (step == 1) | (step == np.diff(columns)) | ~(text[1:] & text[:-1])
        unclear = ~zero[row, columns[1:]] & ((step < 0) | ~counts_on) | opened[row, columns[1:]]
        if unclear.any():
            column = int(columns[1:][unclear][0])
            raise InvalidPacking(
                f"position_ids of shape (3, rows, columns) neither go on nor begin at 0 in all sections at row {row}, "
                f"column {column}, so autopack cannot tell whether a document starts there. Declare the documents by "
                f"seq_idx too (one number for one document), or by segment ids in attention_mask.",
                code="documents-unclear",
            )
    return zero


def segment_starts(mask: np.ndarray) -> np.ndarray:
    starts = changes(mask)
    for row, ids in enumerate(mask):
        runs = ids[starts[row] & (ids > 0)]
        values, counts = np.unique(runs, return_counts=True)
        if (counts > 1).any():
            raise InvalidPacking(
                f"attention_mask holds segment ids, and each id must be one unbroken run of a row; in row {row} id "
                f"{values[counts > 1][0]} comes back after another. Number the documents of a row 1, 2, 3, ...",
                code="declaration-invalid",
            )
    return starts


def cumulative_starts(host: dict[str, np.ndarray], real: np.ndarray) -> np.ndarray:
    q, k = (host.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    bounds: Any = q if q is not None else k
    if q is not None and k is not None and not np.array_equal(q, k):
        raise InvalidPacking(
            f"cu_seq_lens_q and cu_seq_lens_k must be equal; found {q.tolist()} and {k.tolist()}",
            code="documents-unclear",
        )
    columns, last = real.shape[1], int(bounds[-1])
    # Some collators repeat the end; an empty document is none. Others end before padding that the mask marks.
    if bounds[0] != 0 or last > real.size or (np.diff(bounds) < 0).any() or real.reshape(-1)[last:].any():
        raise InvalidPacking(
            f"cu_seq_lens must rise from 0 to the {real.size} tokens of the flattened rows; found "
            f"{bounds.tolist()[:8]}{'...' if len(bounds) > 8 else ''} ending at {last}. They may end before the last "
            f"padding, where attention_mask says that it is such.",
            code="declaration-invalid",
        )
    starts = np.zeros(real.size + 1, dtype=bool)
    starts[last:] = True
    starts[bounds] = True
    grid = starts[:-1].reshape(real.shape)
    if not grid[:, 0].all():
        row = int(np.flatnonzero(~grid[:, 0])[0])
        raise InvalidPacking(
            f"cu_seq_lens counts over the flattened rows and must have a bound at the start of every row; none at "
            f"token {row * columns}, where row {row} begins: a document cannot span two rows",
            code="declaration-invalid",
        )
    return grid

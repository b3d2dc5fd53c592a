"""The documents of packed rows as rows of a batch: right-padded, or of one length at a time, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autopack.layout.packed import PackedLayout
from autopack.layout.padding import Padding

if TYPE_CHECKING:
    from autopack.layout.packed import PackedLayout


def spread_tokens(value: Any, layout: PackedLayout, spread: Spread) -> Any:
    """An argument in another form, where it has something for every token: a tensor (rows or 1, columns, ...)."""
    if isinstance(value, tuple):
        return tuple(spread_tokens(part, layout, spread) for part in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != layout.columns:
        return value
    return spread(value.expand(layout.rows, *value.shape[1:]))


GROWTH = 1.5
"""Largest ratio of lengths in one bucket: padding costs at most a third, and few buckets are needed."""

Spread = Callable[[torch.Tensor], torch.Tensor]
"""Brings a tensor (rows, columns, ...) into the form (documents, tokens, ...) that a mixer is run in."""
Run = Callable[[Spread], Any]
"""Runs a mixer in that form."""


@dataclass(frozen=True)
class Piece:
    """Some documents, or their first tokens, as right-padded rows."""

    where: torch.Tensor
    """Token of the flattened rows that stands at each place: int64 (documents, tokens)."""
    kept: torch.Tensor | None
    """Places of the flattened piece that are not padding, in order; None where all are kept."""
    tokens: np.ndarray
    """Token of the flattened rows at each place that is kept."""
    columns: int
    """Columns of the rows."""

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, *tensor.shape[2:])[self.where]

    def square(self, mask: torch.Tensor) -> torch.Tensor:
        """Of a mask or bias (rows or 1, ..., columns or 1, columns), what belongs to each document, without padding.

        The result is (documents, ..., tokens or 1, tokens). Some releases make masks for one key more than there are.
        """
        row, column = self.where // self.columns, self.where % self.columns
        if mask.shape[0] == 1:
            row = torch.zeros_like(row)
        parts = mask[row[:, 0]]
        between = (1,) * (mask.dim() - 3)
        keys = column.reshape(len(column), *between, 1, -1)
        parts = parts.gather(-1, keys.expand(*parts.shape[:-1], -1))
        if mask.shape[-2] == 1:
            return parts
        queries = column.reshape(len(column), *between, -1, 1)
        return parts.gather(-2, queries.expand(*parts.shape[:-2], -1, parts.shape[-1]))

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tokens of an output (documents, tokens, ...) without padding: (tokens, ...)."""
        flat = tensor.reshape(-1, *tensor.shape[2:])
        return flat if self.kept is None else flat.index_select(0, self.kept)

    def holds(self, part: Any) -> bool:
        """Whether a part of an output has a value for every token."""
        return isinstance(part, torch.Tensor) and part.shape[:2] == self.where.shape


def piece(layout: PackedLayout, documents: np.ndarray, longest: int | None = None) -> Piece:
    """These documents, or the first `longest` tokens of each, as rows."""
    starts, lengths = layout.bounds[documents], np.diff(layout.bounds)[documents]
    lengths = lengths if longest is None else np.minimum(lengths, longest)
    columns = np.arange(lengths.max())
    # Padding repeats the last token: it is finite, and what is made of it is dropped.
    where = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    real = np.flatnonzero((columns < lengths[:, None]).reshape(-1))
    kept = None if len(real) == where.size else layout.upload(real)
    return Piece(layout.upload(where), kept, where.reshape(-1)[real], layout.columns)


def buckets(layout: PackedLayout) -> list[np.ndarray]:
    """Numbers of the documents of each bucket, the shortest first; in each, lengths are within a factor of `GROWTH`."""
    lengths = np.asarray(layout.lengths)
    order = np.argsort(lengths, kind="stable")
    found: list[np.ndarray] = []
    start = 0
    while start < len(order):
        end = int(np.searchsorted(lengths[order], lengths[order[start]] * GROWTH, side="right"))
        found.append(order[start:end])
        start = end
    return found


def each_by_itself(layout: PackedLayout) -> list[np.ndarray]:
    """Numbers of the documents, one in each group."""
    return [np.array([number]) for number in range(len(layout.lengths))]


def equally_long(layout: PackedLayout) -> list[np.ndarray]:
    """Numbers of the documents of each length, the shortest first: groups that need no padding."""
    lengths = np.asarray(layout.lengths)
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths)]


def pieces(
    layout: PackedLayout, grouping: Callable[[PackedLayout], list[np.ndarray]] = buckets
) -> tuple[list[Piece], torch.Tensor]:
    """All documents in pieces, and the places of the tokens of the flattened rows in what the pieces keep."""
    return layout.derived(("pieces", grouping), lambda: in_pieces(layout, grouping(layout)))


def in_pieces(layout: PackedLayout, groups: list[np.ndarray]) -> tuple[list[Piece], torch.Tensor]:
    """These groups of documents as pieces, and the places of the tokens of the flattened rows in what they keep."""
    found = [piece(layout, documents) for documents in groups]
    back = np.argsort(np.concatenate([piece.tokens for piece in found]), kind="stable")
    return found, layout.upload(back)


def together(layout: PackedLayout, pieces: list[Piece], back: torch.Tensor, outputs: list[Any]) -> Any:
    """What a mixer gave for all pieces, in the form of packed rows; the last one's where it is not by tokens."""
    if isinstance(outputs[0], dict):  # outputs of transformers too
        merged = {key: together(layout, pieces, back, [each[key] for each in outputs]) for key in outputs[0]}
        return type(outputs[0])(**merged)
    if isinstance(outputs[0], (tuple, list)):
        return type(outputs[0])(together(layout, pieces, back, list(parts)) for parts in zip(*outputs, strict=True))
    return _together(layout, pieces, back, outputs)


def _together(layout: PackedLayout, pieces: list[Piece], back: torch.Tensor, parts: list[Any]) -> Any:
    if not all(piece.holds(part) for piece, part in zip(pieces, parts, strict=True)):
        return parts[-1]
    whole = torch.cat([piece.real(part) for piece, part in zip(pieces, parts, strict=True)]).index_select(0, back)
    return whole.reshape(layout.rows, layout.columns, *whole.shape[1:])


class DocumentRows:
    """The documents of packed rows as a right-padded batch, one per row, in order; runs of padding are left out."""

    def __init__(self, layout: PackedLayout):
        kept = slice(None) if layout.is_padding is None else ~layout.is_padding
        self.starts: np.ndarray = layout.bounds[:-1][kept]
        """First token of each document in the flattened rows."""
        self.lengths: np.ndarray = np.diff(layout.bounds)[kept]
        columns = np.arange(self.lengths.max())
        self.padding = Padding(columns < self.lengths[:, None], layout.device)
        self.is_padded = not self.padding.real.all()
        self.real = layout.upload(self.padding.real)
        """True at tokens, (documents, longest)."""
        self._where = layout.upload((self.starts[:, None] + columns)[self.padding.real])

    @classmethod
    def of(cls, layout: PackedLayout) -> DocumentRows:
        """Those of a layout, made once."""
        return layout.derived("document rows", lambda: cls(layout))

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """A tensor (rows, columns, ...) as (documents, longest, ...), zero at padding. Differentiable."""
        tokens = rows.reshape(-1, *rows.shape[2:]).index_select(0, self._where.to(rows.device))
        return self.padding.restore(tokens[None])

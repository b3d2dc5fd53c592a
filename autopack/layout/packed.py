"""Places of the documents of a packed batch: an immutable value, built once per forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from autopack.errors import InvalidPacking
from autopack.layout import IGNORED_LABEL
from autopack.layout.host import upload
from autopack.layout.ways import changes

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The documents of a batch of packed rows, in order, over the flattened rows.

    * `rows` and `columns` are the shape of the batch.
    * `bounds` holds, on the host, the first token of each document in the flattened rows, and
      `rows * columns` at the end; `cu_seqlens` is the same as an int32 tensor on `device`.
    * `slots` are bounds of fixed number, the end repeated, if the call declared such: a compiled
      graph is made for it. `slots_on_host` is the slots, or the bounds, as an int32 tensor on the
      CPU.
    * `first_positions` are the positions of the first tokens of the documents; None if the call
      declared none. `largest_positions` are their largest ones; None if positions count on by one
      in every document.
    * `is_padding` tells which documents are runs of padding; None if none is. A run of padding is a
      document of its own, that attends to nothing else and that nothing attends to.

    A document never spans two rows.
    """

    rows: int
    columns: int
    bounds: np.ndarray
    device: torch.device
    sizes: np.ndarray = field(init=False)
    """Length of each document in tokens, on the host: int64 (documents,)."""
    cu_seqlens: Tensor = field(init=False)
    first_positions: np.ndarray | None = None
    is_padding: np.ndarray | None = None
    slots: np.ndarray | None = None
    largest_positions: np.ndarray | None = None
    _slots: Tensor = field(init=False)
    slots_on_host: Tensor = field(init=False)
    extent: Tensor = field(init=False)
    _derived: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds = self.bounds
        fixed = (bounds if self.slots is None else self.slots).astype(np.int32)
        # Built here rather than on first use: inside a compiled graph it must be a tensor that
        # already exists.
        cu_seqlens = upload(bounds.astype(np.int32), self.device)
        vars(self).update(
            sizes=np.diff(bounds),
            cu_seqlens=cu_seqlens,
            extent=cu_seqlens.new_empty(()).expand(self.rows, self.columns),
            slots_on_host=torch.from_numpy(fixed),
            _slots=cu_seqlens if self.slots is None else self.upload(fixed),
        )

    @classmethod
    def from_lengths(
        cls, lengths: list[list[int]], device: torch.device | str = "cpu"
    ) -> PackedLayout:
        """Return the layout of documents of lengths, by row; `ValueError` for unequal rows."""
        columns = sum(lengths[0])
        if any(sum(row) != columns for row in lengths):
            raise ValueError(
                "every row must have the same number of tokens; found "
                f"{[sum(row) for row in lengths]}",
            )
        bounds = np.cumsum([0, *(length for row in lengths for length in row)])
        return cls(len(lengths), columns, bounds, torch.device(device))

    @classmethod
    def from_starts(
        cls,
        starts: np.ndarray,
        device: torch.device,
        positions: np.ndarray | None,
        real: np.ndarray,
        slots: int = 0,
    ) -> PackedLayout:
        """Return the layout of masks (rows, columns): `starts` of documents, and `real` tokens.

        `positions` are the position ids of the call, of the same shape, if known. A run of padding
        longer than every document is cut: models may have no positions for so many tokens. `slots`
        is the number of bounds that the call declared.
        """
        rows, columns = starts.shape
        bounds = np.append(np.flatnonzero(starts), rows * columns)
        fixed = (
            np.pad(bounds, (0, slots - len(bounds)), mode="edge") if slots >= len(bounds) else None
        )
        lengths, is_real = np.diff(bounds), real.reshape(-1)[bounds[:-1]]
        longest = lengths[is_real].max(initial=0)
        if longest and lengths.max() > longest:
            bounds = _cut(bounds, longest)
        padding = None if real.all() else ~real.reshape(-1)[bounds[:-1]]
        if positions is None:
            return cls(rows, columns, bounds, device, None, padding, fixed)
        places = positions.reshape(-1)
        counted = (np.diff(places) == 1) | ~real.reshape(-1)[1:]
        counted[bounds[1:-1] - 1] = True
        largest = None if counted.all() else np.maximum.reduceat(places, bounds[:-1])
        return cls(rows, columns, bounds, device, places[bounds[:-1]], padding, fixed, largest)

    @classmethod
    def of_padded(
        cls,
        real: np.ndarray,
        device: torch.device,
        positions: np.ndarray | None = None,
    ) -> PackedLayout:
        """Return the layout whose documents are the runs of real tokens, and of padding."""
        return cls.from_starts(changes(real), device, positions, real)

    def upload(self, array: np.ndarray) -> Tensor:
        """Return a host array as a tensor on the layout's device."""
        return upload(array, self.device)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; in compiled code read from a tensor, so that one graph serves any."""
        if torch.compiler.is_compiling():
            return self.extent.shape[0], self.extent.shape[1]
        return self.rows, self.columns

    @property
    def kernel_cu_seqlens(self) -> Tensor:
        """`cu_seqlens` for kernels; in compiled code, as many elements as the call declared."""
        return self._slots if torch.compiler.is_compiling() else self.cu_seqlens

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of each document in tokens."""
        return tuple(self.sizes.tolist())

    @cached_property
    def max_seqlen(self) -> int:
        """Length of the longest document in tokens."""
        return max(self.lengths)

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """Row, first column and end column of each document."""
        rows, columns = np.divmod(self.bounds[:-1], self.columns)
        return tuple(
            zip(rows.tolist(), columns.tolist(), (columns + self.sizes).tolist(), strict=True)
        )

    @cached_property
    def lengths_by_row(self) -> list[list[int]]:
        """Length of each document in tokens, by row."""
        first_of_rows = np.flatnonzero(np.diff(self.bounds[:-1] // self.columns)) + 1
        return [sizes.tolist() for sizes in np.split(self.sizes, first_of_rows)]

    @cached_property
    def starts(self) -> np.ndarray:
        """First column of each token's document, on the host: int64 (rows, columns)."""
        first = np.repeat(self.bounds[:-1], self.sizes)
        return (first % self.columns).reshape(self.rows, self.columns)

    @cached_property
    def start_columns(self) -> Tensor:
        """`starts` as a tensor on the layout's device."""
        return self.upload(self.starts)

    @cached_property
    def seq_idx(self) -> Tensor:
        """Number of each token's document within the flattened rows: int32 (rows, columns)."""
        numbers = np.repeat(np.arange(len(self.bounds) - 1, dtype=np.int32), self.sizes)
        return self.upload(numbers.reshape(self.rows, self.columns))

    def position_ids(self, first_position: int = 0) -> Tensor:
        """Return positions from `first_position` on in every document: int64 (rows, columns)."""
        return self.upload(np.arange(self.columns) - self.starts + first_position)

    def without_padding(self) -> PackedLayout:
        """Return the layout of one row of the documents that are no runs of padding."""
        kept = real_documents(self)
        first, largest = (
            v if v is None else v[kept] for v in (self.first_positions, self.largest_positions)
        )
        return one_row(self.sizes[kept], self.device, first, largest)

    def in_chunks(self, size: int) -> PackedLayout:
        """Return the layout with documents cut into chunks of `size` tokens (chunked attention)."""

        chunks = partial(PackedLayout, self.rows, self.columns)
        return self.derived(("chunks", size), lambda: chunks(_cut(self.bounds, size), self.device))

    def derived(self, key: Any, build: Callable[[], _T]) -> _T:
        """Return `build()`, cached under `key`: all layers of a forward share one layout."""
        if key not in self._derived:
            self._derived[key] = build()
        return self._derived[key]

    def to(self, device: torch.device) -> PackedLayout:
        """Return the layout with its tensors on `device` (pipeline stages may lie on several)."""
        if device == self.device:
            return self
        return self.derived(device, lambda: replace(self, device=device, _derived={}))

    def __repr__(self) -> str:
        return (
            f"PackedLayout({self.rows} x {self.columns} tokens, {len(self.lengths)} documents of "
            f"{min(self.lengths)} to {self.max_seqlen}, on {self.device})"
        )


def one_row(
    lengths: Iterable[int],
    device: torch.device,
    first: np.ndarray | None = None,
    largest: np.ndarray | None = None,
) -> PackedLayout:
    """Return the layout of one row of documents of these lengths, first and largest positions."""
    bounds = np.cumsum([0, *lengths])
    return PackedLayout(1, int(bounds[-1]), bounds, device, first, largest_positions=largest)


def rows_as_documents(
    real: np.ndarray,
    device: torch.device,
    positions: np.ndarray | None = None,
) -> PackedLayout:
    """Return the layout of a padded batch's rows, none of them empty, as one packed row.

    `real` (rows, columns) is True at tokens; `positions` are the position ids, of that shape.
    """
    lengths = real.sum(axis=1)
    first = None if positions is None else positions[real][np.cumsum(lengths) - lengths]
    return one_row(lengths, device, first)


def real_documents(layout: PackedLayout) -> np.ndarray:
    """Return True for documents that are no runs of padding: bool (documents,), on the host."""
    return (
        np.ones(len(layout.bounds) - 1, dtype=bool)
        if layout.is_padding is None
        else ~layout.is_padding
    )


def real_tokens(layout: PackedLayout) -> np.ndarray:
    """Return True at tokens of packed rows that are no padding, on the host: (rows, columns)."""
    return np.repeat(real_documents(layout), layout.sizes).reshape(layout.rows, layout.columns)


def _cut(bounds: np.ndarray, size: int) -> np.ndarray:
    """Return `bounds` with more between them, so that neighbours are at most `size` apart."""
    return np.concatenate([*(np.arange(a, b, size) for a, b in pairwise(bounds)), bounds[-1:]])


def without_boundaries(
    labels: Tensor, layout: PackedLayout, shifted: bool = False, ignored: int = IGNORED_LABEL
) -> Tensor:
    """Return packed rows' labels with each document's first one ignored, for a loss that shifts.

    `labels` have one for each token: (rows, columns), (tokens,) or the like, or (rows, columns,
    codebooks). The first label of each document is ignored; of `shifted` labels, which stand at the
    token that predicts them, the last. `ignored` is the label that the loss leaves out. Raises
    `InvalidPacking` for labels of a shape that does not show which belongs to which token.
    """
    shape, tokens = layout.shape, layout.rows * layout.columns
    if tuple(labels.shape[:2]) == shape:
        flat = labels.reshape(tokens, *labels.shape[2:])
    elif labels.numel() == tokens and labels.shape[-1] in (tokens, layout.columns):
        flat = labels.reshape(tokens)
    else:
        raise InvalidPacking(
            f"labels must have one for each token of the packed rows, {shape}; found "
            f"{tuple(labels.shape)}, in which autopack cannot tell where documents begin",
            code="wrong-labels",
        )
    bounds = layout.cu_seqlens.long()
    at = bounds[1:] - 1 if shifted else bounds[:-1]
    return flat.index_fill(0, at.to(labels.device), ignored).reshape(labels.shape)

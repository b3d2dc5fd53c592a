"""Places of the real tokens of a padded batch: out of the batch into one packed row, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from autopack.layout.packed import PackedLayout, one_row


@dataclass(frozen=True, eq=False)
class Padding:
    """A padded batch with one document per row; `real` is True at its tokens, (rows, columns) on
    the host.

    Every row must hold at least one token. Padding may lie on the right, on the left, or between
    tokens (holes).
    """

    real: np.ndarray
    device: torch.device

    @cached_property
    def index(self) -> torch.Tensor:
        """Places of the real tokens in the flattened batch: int64 (tokens,) on `device`."""
        return torch.from_numpy(np.flatnonzero(self.real)).to(self.device, non_blocking=True)

    def of(self, name: str | None) -> Padding:
        """Return this padding, which holds for any output; the counterpart of `Pair.of`."""
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the batch, padding included."""
        return self.rows, self.columns

    @property
    def rows(self) -> int:
        return self.real.shape[0]

    @property
    def columns(self) -> int:
        return self.real.shape[1]

    @cached_property
    def tokens(self) -> int:
        """Number of real tokens."""
        return int(self.real.sum())

    @cached_property
    def on_the_right(self) -> bool:
        """True if every row has its tokens first and then padding."""
        return bool((self.real[:, :-1] >= self.real[:, 1:]).all())

    @cached_property
    def has_holes(self) -> bool:
        """True if padding lies between tokens of a row."""
        return len(self.unpredicted) > self.rows

    @cached_property
    def unpredicted(self) -> np.ndarray:
        """Places in the packed row of the tokens without a real token right before them in the
        batch."""
        return np.flatnonzero(np.pad(~self.real[:, :-1], ((0, 0), (1, 0)), constant_values=True)[self.real])

    def layout(self, positions: np.ndarray | None = None) -> PackedLayout:
        """Return the packed row of the batch's documents; `positions` (rows, columns) if known."""
        lengths = self.real.sum(axis=1)
        first = None if positions is None else positions[self.real][np.cumsum(lengths) - lengths]
        return one_row(lengths, self.device, first)

    def gather(self, batch: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """Return the real tokens of (rows, columns, ...) as one row, (1, tokens, ...).
        Differentiable.

        The columns lie at `axis`, behind the rows. With 0 the batch is flat, (rows * columns, ...),
        and so is the result.
        """
        along = max(axis - 1, 0)
        flat = batch.flatten(along, along + 1) if axis else batch
        found = flat.index_select(along, self.index.to(batch.device))
        return found.unsqueeze(along) if axis else found

    def restore(self, row: torch.Tensor, axis: int = 1, fill: bool = False) -> torch.Tensor:
        """Return the result of `gather` in the form of the batch again, zero at padding.
        Differentiable.

        With `fill`, padding gets the values of the first token.
        """
        along = max(axis - 1, 0)
        tokens = row.select(along, 0) if axis else row
        batch = self._restored(tokens, along)
        if fill:
            batch.movedim(along, 0)[self._others.to(batch.device)] = tokens.select(along, 0)
        return batch.unflatten(along, self.shape) if axis else batch

    def _restored(self, tokens: torch.Tensor, along: int) -> torch.Tensor:
        """Return tokens, which lie along an axis, at their places in the flattened batch."""
        # In place on fresh zeros: index_copy would make a second tensor of this size.
        empty = tokens.new_zeros(*tokens.shape[:along], self.real.size, *tokens.shape[along + 1 :])
        return empty.index_copy_(along, self.index.to(tokens.device), tokens)

    @cached_property
    def _others(self) -> torch.Tensor:
        """Places of padding in the flattened batch: int64 on `device`."""
        return torch.from_numpy(np.flatnonzero(~self.real)).to(self.device, non_blocking=True)

"""Where the real tokens of a padded batch lie: out of the batch into one packed row, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from autopack.layout.packed import PackedLayout


@dataclass(frozen=True, eq=False)
class Padding:
    """A padded batch with one document per row; `real` is true at its tokens, (rows, columns) on the host.

    Every row must hold at least one token. Padding may lie on the right, on the left, or between tokens (holes).
    """

    real: np.ndarray
    device: torch.device

    @cached_property
    def index(self) -> torch.Tensor:
        """Places of the real tokens in the flattened batch: int64 (tokens,) on `device`."""
        return torch.from_numpy(np.flatnonzero(self.real)).to(self.device, non_blocking=True)

    def of(self, name: str | None) -> Padding:
        """Returns itself: the padding of any output; the counterpart of `Pair.of`."""
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
        """Whether every row is its tokens first and then padding."""
        return bool((self.real[:, :-1] >= self.real[:, 1:]).all())

    @cached_property
    def has_holes(self) -> bool:
        """Whether padding lies between tokens of a row."""
        return len(self.unpredicted) > self.rows

    @cached_property
    def unpredicted(self) -> np.ndarray:
        """Places in the packed row of the tokens that no real token comes right before of in the batch."""
        return np.flatnonzero(np.pad(~self.real[:, :-1], ((0, 0), (1, 0)), constant_values=True)[self.real])

    def layout(self, positions: np.ndarray | None = None) -> PackedLayout:
        """The packed row of the batch's documents; `positions` (rows, columns) are those of the batch, if known."""
        bounds = np.cumsum([0, *self.real.sum(axis=1)])
        first = None if positions is None else positions[self.real][bounds[:-1]]
        return PackedLayout(1, self.tokens, bounds, self.device, first)

    def gather(self, batch: torch.Tensor) -> torch.Tensor:
        """The real tokens of a (rows, columns, ...) tensor as one row: (1, tokens, ...). Differentiable."""
        return self.gather_flat(batch.reshape(self.rows * self.columns, *batch.shape[2:]))[None]

    def gather_flat(self, batch: torch.Tensor) -> torch.Tensor:
        """The real tokens of a flattened batch (rows * columns, ...): (tokens, ...)."""
        return batch.index_select(0, self.index.to(batch.device))

    def apart(self, row: torch.Tensor, columns: int) -> torch.Tensor:
        """What of a row that ran belongs to each real token, whose columns lie at this axis: the row itself."""
        return row

    def restore(self, row: torch.Tensor) -> torch.Tensor:
        """A (1, tokens, ...) tensor in the form of the batch, (rows, columns, ...), zero at padding. Differentiable."""
        return self.restore_flat(row[0]).reshape(self.rows, self.columns, *row.shape[2:])

    def restore_flat(self, tokens: torch.Tensor) -> torch.Tensor:
        """A (tokens, ...) tensor in the form of the flattened batch, (rows * columns, ...), zero at padding."""
        # In place on fresh zeros: index_copy would make a second tensor of this size.
        empty = tokens.new_zeros(self.rows * self.columns, *tokens.shape[1:])
        return empty.index_copy_(0, self.index.to(tokens.device), tokens)

    def fill(self, batch: torch.Tensor, token: torch.Tensor) -> None:
        """Write what a token has, of shape (...), at the padding of a (rows, columns, ...) tensor, in place."""
        flat = self._others.to(batch.device)
        batch[flat // self.columns, flat % self.columns] = token

    def fill_flat(self, batch: torch.Tensor, token: torch.Tensor) -> None:
        """The same at the padding of a flattened batch (rows * columns, ...)."""
        batch[self._others.to(batch.device)] = token

    @cached_property
    def _others(self) -> torch.Tensor:
        """Places of padding in the flattened batch: int64 on `device`."""
        return torch.from_numpy(np.flatnonzero(~self.real)).to(self.device, non_blocking=True)

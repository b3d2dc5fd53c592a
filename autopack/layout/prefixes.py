"""Common beginnings of the rows of a padded batch, and the row that holds them once.

Shapes: R rows, C columns, T real tokens of the batch, S tokens of the row that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from autopack.layout.packed import PackedLayout, one_row
from autopack.layout.token_map import TokenMap


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of a document, in columns `first` to `end` of the row that runs.

    `depth` is the number of tokens before them in their document. `chain` holds the numbers of the
    document's stretches up to its end, in order, its own the last.
    """

    first: int
    end: int
    depth: int
    chain: tuple[int, ...]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class Prefixes:
    """A tree of stretches: documents that begin alike share the stretches of their common tokens.

    `columns` holds, for each token of the documents, laid end to end, its column in the row that
    runs: int64 (T,). A stretch comes after its parent.
    """

    stretches: tuple[Stretch, ...]
    columns: np.ndarray
    device: torch.device
    documents: PackedLayout
    """The documents as they would lie in a packed row that shares nothing."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the row that runs, S."""
        return self.stretches[-1].end

    @property
    def saved(self) -> int:
        """Number of the documents' tokens that do not run, since another document has the same."""
        return len(self.columns) - self.tokens

    @cached_property
    def row(self) -> TokenMap:
        """Map of the documents, end to end in one row, into the row that runs."""
        return TokenMap.of_real(
            np.ones((1, len(self.columns)), dtype=bool), self.device, self.columns
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each stretch in tokens."""
        return [stretch.length for stretch in self.stretches]

    @cached_property
    def queries(self) -> PackedLayout:
        """Layout of the stretches as documents, for kernels that take lengths of keys as well."""
        return one_row(self.lengths, self.device)

    @cached_property
    def keys(self) -> PackedLayout:
        """Layout of the tokens that each stretch attends to: its document up to its end."""
        return one_row((stretch.depth + stretch.length for stretch in self.stretches), self.device)

    @cached_property
    def key_columns(self) -> torch.Tensor:
        """Columns, in the row that runs, of the tokens of `keys`: int64 on the device."""
        spans = [
            np.arange(self.stretches[n].first, self.stretches[n].end)
            for stretch in self.stretches
            for n in stretch.chain
        ]
        return self.documents.upload(np.concatenate(spans))

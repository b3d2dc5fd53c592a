"""Common beginnings of the rows of a padded batch, and the row that holds them once.

Shapes: R rows, C columns, T real tokens of the batch, S tokens of the row that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from autopack.layout.packed import PackedLayout, one_row, real_documents
from autopack.layout.token_map import TokenMap


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of a document, in columns `first` to `end` of the row that runs.

    `depth` is the number of tokens before them in their document. Those tokens belong to the
    stretch number `parent` and to its parents; `parent` is None for a stretch that begins a
    document.
    """

    first: int
    end: int
    depth: int
    parent: int | None

    @property
    def length(self) -> int:
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
        """Number of tokens that are not computed, since another document has computed them."""
        return len(self.columns) - self.tokens

    @cached_property
    def row(self) -> TokenMap:
        """The way of the documents, end to end in one row, into the row that runs."""
        return TokenMap.of_shared(np.ones((1, len(self.columns)), dtype=bool), self.columns, self.device)

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """For each stretch, the numbers of the stretches of its document up to its end, the first
        one first."""
        found: list[tuple[int, ...]] = []
        for number, stretch in enumerate(self.stretches):
            found.append((*(() if stretch.parent is None else found[stretch.parent]), number))
        return tuple(found)

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each stretch in tokens."""
        return [stretch.length for stretch in self.stretches]

    @cached_property
    def queries(self) -> PackedLayout:
        """Stretches as documents of the row that runs, for kernels that take lengths of queries and
        of keys."""
        return one_row(self.lengths, self.device)

    @cached_property
    def keys(self) -> PackedLayout:
        """Tokens that each stretch attends to, end to end: its document up to its end."""
        return one_row((stretch.depth + stretch.length for stretch in self.stretches), self.device)

    @cached_property
    def key_columns(self) -> torch.Tensor:
        """Columns, in the row that runs, of the tokens of `keys`: int64 on the device."""
        spans = [np.arange(self.stretches[n].first, self.stretches[n].end) for chain in self.chains for n in chain]
        return self.documents.upload(np.concatenate(spans))

    @cached_property
    def numbers(self) -> torch.Tensor:
        """For each column of the row that runs, the number of its stretch: int64 (S,) on the
        device."""
        return self.documents.upload(np.repeat(np.arange(len(self.stretches)), self.lengths))

    @cached_property
    def depths(self) -> torch.Tensor:
        """For each column of the row that runs, its token's place in its document: int64 (S,) on
        the device."""
        return self.documents.upload(np.concatenate([np.arange(s.depth, s.depth + s.length) for s in self.stretches]))

    @cached_property
    def sees(self) -> torch.Tensor:
        """True if a stretch (first axis) attends to another one or itself: bool, on the device."""
        seen = np.zeros((len(self.stretches),) * 2, dtype=bool)
        for number, chain in enumerate(self.chains):
            seen[number, list(chain)] = True
        return self.documents.upload(seen)


def in_one_row(layout: PackedLayout) -> PackedLayout:
    """Return the documents of packed rows without runs of padding, end to end in a single row."""
    real = real_documents(layout)
    told = (layout.first_positions, layout.largest_positions)
    first, largest = (None if of is None else of[real] for of in told)
    return one_row(np.diff(layout.bounds)[real], layout.device, first, largest)


def find(
    tokens: np.ndarray,
    positions: np.ndarray,
    lengths: np.ndarray,
    layout: Callable[[], PackedLayout],
    least: int,
    share: float,
) -> Prefixes | None:
    """Return the tokens that documents have in common at their beginning, or None if they are too
    few.

    `tokens` and `positions`, (T,) ints, belong to documents of these `lengths`, end to end;
    `layout` makes the row of them. Tokens are common if they are equal in both. Shared stretches
    have at least `least` tokens, and at least the `share` of all tokens is saved.
    """
    keys = (tokens.astype(np.int64) << 32) | positions.astype(np.int64)
    keyed = np.split(keys, np.cumsum(lengths)[:-1])
    order = sorted(range(len(keyed)), key=lambda number: keyed[number].tobytes())
    common = [_common(keyed[one], keyed[other]) for one, other in pairwise(order)]
    if max(common, default=0) < least or sum(common) < share * len(tokens):
        return None
    stretches, chains = _tree(common, lengths[order].tolist(), least)
    spans = [np.empty(0, dtype=np.int64)] * len(order)
    for number, chain in zip(order, chains, strict=True):
        spans[number] = np.concatenate([np.arange(stretches[n].first, stretches[n].end) for n in chain])
    saved = len(tokens) - stretches[-1].end
    if saved <= 0 or saved < share * len(tokens):
        return None
    documents = layout()
    return Prefixes(tuple(stretches), np.concatenate(spans), documents.device, documents)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of elements that two arrays begin with in common."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _tree(common: Sequence[int], lengths: Sequence[int], least: int) -> tuple[list[Stretch], list[tuple[int, ...]]]:
    """Return the stretches of documents sorted so that those that begin alike are neighbours.

    `common` is the number of tokens that each has in common with the next one. The second result
    holds, for each document, the numbers of its stretches.
    """
    stretches: list[Stretch] = []
    chains: list[tuple[int, ...]] = [()] * len(lengths)

    def add(depth: int, end: int, chain: tuple[int, ...]) -> tuple[int, ...]:
        if end == depth:
            return chain
        first = stretches[-1].end if stretches else 0
        stretches.append(Stretch(first, first + end - depth, depth, chain[-1] if chain else None))
        return (*chain, len(stretches) - 1)

    waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(lengths), 0, ())]
    while waiting:
        begin, stop, depth, chain = waiting.pop()
        if stop - begin == 1:
            chains[begin] = add(depth, lengths[begin], chain)
            continue
        shortest = min(common[begin : stop - 1])
        if shortest - depth >= least:
            chain, depth = add(depth, shortest, chain), shortest
        cuts = [begin, *(i + 1 for i in range(begin, stop - 1) if common[i] == shortest), stop]
        waiting += [(one, other, depth, chain) for one, other in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return stretches, chains

"""Counts, on the host, of the calls of one enabled model, their outcomes, and findings of their
checks."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import gt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from autopack.layout.packed import PackedLayout

# called when a call has been counted, of any model of this process
after_each: Callable[[], None] | None = None


class Volume(NamedTuple):
    """Numbers of rows, columns, tokens and documents of some calls, and of what did not run."""

    calls: int = 0
    rows: int = 0  # rows that ran; a padded batch that ran as a packed row is one
    columns: int = 0
    """Columns that ran, over all rows (and halves): each costs as much as a token."""
    tokens: int = 0  # real tokens of them, and those that were shared
    documents: int = 0
    skipped: int = 0  # columns of padding that came and did not run
    # real tokens that did not run, since another row of the batch began with the same ones
    shared: int = 0

    @classmethod
    def of_layout(cls, layout: PackedLayout) -> Volume:
        """Return the volume of packed rows that run unchanged.

        Several documents of one token each at the end of a row are padding without a mark (position
        0 for each).
        """
        columns, lengths = int(layout.bounds[-1]), layout.sizes
        single, others = lengths == 1, 0
        if layout.is_padding is not None:
            others = int(layout.is_padding.sum())
        elif (single[1:] & single[:-1]).any():
            ends = np.flatnonzero(layout.bounds[1:] % layout.columns == 0) + 1
            rows = (row for row in np.split(single, ends) if len(row))
            counts = [len(row) if row.all() else int(row[::-1].argmin()) for row in rows]
            others = sum(count for count in counts if count > 1)
        padding = others if layout.is_padding is None else int(lengths[layout.is_padding].sum())
        return cls(1, layout.rows, columns, columns - padding, len(lengths) - others)

    @classmethod
    def of_row(cls, documents: int, *halves: np.ndarray, saved: int = 0) -> Volume:
        """Return the volume of a batch run as one row, or one per half (masks of real tokens).

        `saved` of them do not run, since another row began with the same ones.
        """
        tokens = sum(int(real.sum()) for real in halves)
        skipped = sum(real.size for real in halves) - tokens
        return cls(1, 1, tokens - saved, tokens, documents, skipped, saved)

    @classmethod
    def of_batch(cls, *halves: np.ndarray) -> Volume:
        """Return the volume of a batch that runs as it came, one document per row.

        Each half is a mask, (rows, columns), that is True at real tokens.
        """
        rows, columns = len(halves[-1]), sum(real.size for real in halves)
        return cls(1, rows, columns, sum(int(real.sum()) for real in halves), rows)

    def without_padding(self) -> Volume:
        """Return the volume of the same calls if they run without their padding."""
        return self._replace(
            columns=self.tokens - self.shared,
            skipped=self.skipped + self.columns - self.tokens,
        )

    def plus(self, other: Volume) -> Volume:
        """Return the sum of this volume and another one, field by field."""
        return Volume(*map(int.__add__, self, other))

    def minus(self, other: Volume) -> Volume:
        """Return this volume less another one that is a part of it, field by field."""
        return Volume(*map(int.__sub__, self, other))

    @property
    def fill(self) -> float:
        """Share of real tokens in the columns that ran; 1 if nothing ran."""
        return (self.tokens - self.shared) / self.columns if self.columns else 1.0

    @property
    def padding_skipped(self) -> float:
        """Share of the columns that came that were padding and did not run."""
        came = self.columns + self.skipped + self.shared
        return self.skipped / came if came else 0.0

    @property
    def amount(self) -> str:
        """The numbers of real tokens and of columns that ran, in words."""
        shared = (
            f", {self.shared:,} of them computed with those of another row," if self.shared else ""
        )
        return f"{self.tokens:,} real tokens{shared} in {self.columns:,} columns"

    @property
    def documents_per_row(self) -> float:
        """The mean number of documents in a row."""
        return self.documents / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        return (
            f"{number_of(self.calls, 'call')}, fill {self.fill:.1%} ({self.amount}), "
            f"{self.documents_per_row:.1f} documents per row"
        )


@dataclass
class Tally:
    """Counts of one enabled model's calls by outcome; calls of generation are not counted."""

    unpadded: Volume = field(default_factory=Volume)  # padded batches that ran as a packed row
    # padded batches that were left as they came, by reason
    left: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that autopack would have refused, and that ran as without it, by reason."""
    apart: Counter[str] = field(default_factory=Counter)
    """Batches whose rows began alike and were computed one by one, by reason."""
    after_padding: int = 0
    """Padded batches run as a packed row, without stock's loss terms predicted at padding."""
    unmasked: bool = False
    """True if a batch that looks padded came unmasked, so that all its padding ran."""
    training: Volume = field(default_factory=Volume)
    """All calls in training mode or with gradients, packed, padded or neither."""
    evaluation: Volume = field(default_factory=Volume)  # all others
    _first: tuple[float, int] | None = None
    """The time in seconds when the first training call of this process began, and the real tokens
    that were counted before it. A copy has its own first call.
    """
    _latest: tuple[float, int] = (0.0, 0)  # the same of the latest

    def count(self, volume: Volume, trains: bool, instead_of: Volume | None = None) -> None:
        """Add a call to `training` or `evaluation`, in place of `instead_of` if it was counted."""
        if instead_of is not None:
            volume = volume.minus(instead_of)
        if not trains:
            self.evaluation = self.evaluation.plus(volume)
        else:
            if instead_of is None:
                self._latest = time.perf_counter(), self.training.tokens
                self._first = self._first or self._latest
            self.training = self.training.plus(volume)
        if after_each is not None:
            after_each()

    def add(self, other: Tally) -> None:
        """Add the counts of the same model in another process of this machine, in place."""
        for name in ("after_padding", "left", "refused", "apart"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("unpadded", "training", "evaluation"):
            setattr(self, name, getattr(self, name).plus(getattr(other, name)))
        self.unmasked = self.unmasked or other.unmasked
        if self._first is None:
            self._first, self._latest = other._first, other._latest
        elif other._first is not None:
            self._first = min(self._first[0], other._first[0]), self._first[1] + other._first[1]
            self._latest = (
                max(self._latest[0], other._latest[0]),
                self._latest[1] + other._latest[1],
            )

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens per second from first to latest training call; None before the second."""
        if self._first is None or self._latest[0] <= self._first[0]:
            return None
        return (self._latest[1] - self._first[1]) / (self._latest[0] - self._first[0])

    @property
    def batches(self) -> int:
        """Number of padded batches that ran as a packed row."""
        return self.unpadded.calls

    @property
    def tokens(self) -> int:
        """Number of real tokens of padded batches that ran as a packed row."""
        return self.unpadded.tokens

    @property
    def padding(self) -> int:
        """Number of padding tokens that padded batches run as a packed row left out."""
        return self.unpadded.skipped

    @property
    def trained(self) -> str | None:
        """Volume of all training calls and tokens per second, in words; None if there were none."""
        if not self.training.calls:
            return None
        rate = self.tokens_per_second
        return str(self.training) + (
            "" if rate is None else f", {rate:,.0f} real tokens per second"
        )

    def counted(self) -> dict[str, Any]:
        """Return a copy of the counts so far, by attribute."""
        return copy.deepcopy(vars(self))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore all counts at the end of this block."""
        before = self.counted()
        try:
            yield
        finally:
            vars(self).update(before)

    def __str__(self) -> str:
        parts = []
        if self.batches:
            total = self.tokens + self.padding
            parts.append(
                f"{number_of(self.batches, 'padded batch')} packed inside; {self.padding:,} of "
                f"{total:,} tokens were padding and were not computed ({self.padding / total:.1%})"
            )
        if self.after_padding:
            parts.append(
                f"{number_of(self.after_padding, 'padded batch')} without the terms of stock's "
                "loss that are predicted at padding"
            )
        for reason, count in self.left.most_common():
            parts.append(f"{number_of(count, 'padded batch')} left as they came: {reason}")
        for reason, count in self.refused.most_common():
            parts.append(f"{number_of(count, 'call')} ran as without autopack: {reason}")
        if self.unmasked:
            parts.append(
                "batches that look padded came without an attention_mask, and were computed as "
                "they came",
            )
        return "; ".join(parts) or "no padded batch yet"


@dataclass
class Checked:
    """Counts and findings of checks of calls, and the sizes and kinds of the checked calls."""

    every: int = 0
    """Number of training calls from one check to the next; 0 for scheduled checks alone."""
    checks: int = 0
    """Calls that were checked."""
    worst: float = 0.0
    """The largest error relative to what documents get alone that any of them showed."""
    leaks: int = 0
    """Calls among them in which a document differed by more than rounding."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Checks that could not be made, by reason."""
    calls: int = 0
    """Packed calls, and padded batches without their padding, that have run."""
    trained: int = 0
    """Calls among them in training."""
    since: int = 0
    """Calls since the model was last changed."""
    sizes: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)
    """The largest that were checked.

    Tokens of a call's longest document, documents, rows, tokens of the longest row that runs, the
    last of its tokens in the vocabulary, numbers of its largest media tensor, the longest side of
    media.
    """
    kinds: set[Any] = field(default_factory=set)
    """Kinds that were checked: names of arguments, dtype, modes, special tokens."""

    def begin_anew(self) -> None:
        """Forget which calls were checked, so that the next call of any kind is checked."""
        self.since, self.sizes, self.kinds = 0, (0,) * len(self.sizes), set()

    def goes_beyond(self, sizes: tuple[int, ...], kinds: set[Any], closely: bool) -> bool:
        """Return True if a call is of a new kind or size; sizes up to a power of two count as one.

        It does if a size passes a power of two; of code that is checked `closely`, if it is larger.
        """
        known = self.sizes
        if not closely:
            sizes, known = tuple(map(int.bit_length, sizes)), tuple(map(int.bit_length, known))
        return any(map(gt, sizes, known)) or not kinds <= self.kinds

    def count_and_ask(self, trains: bool) -> bool:
        """Count a call; return True if its number alone, or an earlier leak, makes a check due."""
        self.calls, self.since, self.trained = self.calls + 1, self.since + 1, self.trained + trains
        if self.every and trains and self.trained % self.every == 0:
            return True
        return self.since & (self.since - 1) == 0 or self.leaks > 0

    def grow(self, sizes: tuple[int, ...], kinds: set[Any]) -> None:
        """Add the sizes and kinds of a call that was checked without finding a leak."""
        self.sizes = tuple(map(max, self.sizes, sizes))
        self.kinds |= kinds

    def add(self, other: Checked) -> None:
        """Add the checks of the same model in another process, in place."""
        self.checks, self.leaks = self.checks + other.checks, self.leaks + other.leaks
        self.worst, self.skipped = max(self.worst, other.worst), self.skipped + other.skipped
        self.calls, self.sizes = self.calls + other.calls, tuple(map(max, self.sizes, other.sizes))

    def __str__(self) -> str:
        found = f"every {self.every} training calls; " if self.every else ""
        found += f"{number_of(self.checks, 'check')} in {number_of(self.calls, 'call')}"
        if self.checks:
            found += f", worst relative error {self.worst:.1e}"
        found += f", {self.leaks} leaking" if self.leaks else ""
        return "; ".join(
            [
                found,
                *(f"{count} skipped: {reason}" for reason, count in self.skipped.most_common()),
            ],
        )


def number_of(count: int, what: str) -> str:
    """Return a count and noun `what`, in the plural if needed, such as "2 batches"."""
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")

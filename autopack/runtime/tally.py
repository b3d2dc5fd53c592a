"""What became of the calls of one enabled model, counted on the host."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from autopack.layout.packed import PackedLayout
    from autopack.layout.padding import Padding

after_each: Callable[[], None] | None = None  # called when a call has been counted, of any model of this process


class Volume(NamedTuple):
    """How much some calls held, and how much of it was computed."""

    calls: int = 0
    rows: int = 0  # rows that ran; a padded batch that ran as a packed row is one
    columns: int = 0
    """Columns that ran, over all rows: each of them costs what a token costs. Of an encoder-decoder, those of both."""
    tokens: int = 0  # real tokens of them, and those that were shared
    documents: int = 0
    skipped: int = 0  # columns of padding that came and did not run
    shared: int = 0  # real tokens that did not run, since another row of the batch began with the same ones

    @classmethod
    def of_layout(cls, layout: PackedLayout) -> Volume:
        """Packed rows that run as the rows that they are.

        Several documents of one token each at the end of a row are padding that nothing marks (position 0 for each).
        """
        columns, lengths = int(layout.bounds[-1]), np.diff(layout.bounds)
        if layout.is_padding is None:
            padding = others = _single_at_the_end(lengths == 1, layout.bounds[1:] % layout.columns == 0)
        else:
            padding, others = int(lengths[layout.is_padding].sum()), int(layout.is_padding.sum())
        return cls(1, layout.rows, columns, columns - padding, len(lengths) - others)

    @classmethod
    def of_row(cls, documents: int, *halves: Padding, saved: int = 0) -> Volume:
        """A batch whose real tokens run as one row, or as one for each half of an encoder-decoder.

        `saved` of them do not run, since another row began with the same ones.
        """
        tokens = sum(padding.tokens for padding in halves)
        skipped = sum(padding.real.size for padding in halves) - tokens
        return cls(1, 1, tokens - saved, tokens, documents, skipped, saved)

    @classmethod
    def of_batch(cls, *halves: np.ndarray) -> Volume:
        """A batch that runs as it came, one document per row; true at real tokens, (rows, columns) for each half."""
        rows, columns = len(halves[-1]), sum(real.size for real in halves)
        return cls(1, rows, columns, sum(int(real.sum()) for real in halves), rows)

    def without_padding(self) -> Volume:
        """The same with its padding taken out before it runs."""
        return self._replace(columns=self.tokens - self.shared, skipped=self.skipped + self.columns - self.tokens)

    def plus(self, other: Volume) -> Volume:
        """Both together."""
        return Volume(*map(int.__add__, self, other))

    def minus(self, other: Volume) -> Volume:
        """What of this volume came after the other one, which is a part of it."""
        return Volume(*map(int.__sub__, self, other))

    @property
    def fill(self) -> float:
        """Share of the columns that ran that are real tokens; 1 where nothing ran."""
        return (self.tokens - self.shared) / self.columns if self.columns else 1.0

    @property
    def padding_skipped(self) -> float:
        """Share of the columns that came that are padding and did not run."""
        came = self.columns + self.skipped + self.shared
        return self.skipped / came if came else 0.0

    @property
    def amount(self) -> str:
        """How many tokens ran in how many columns, in words."""
        shared = f", {self.shared:,} of them computed with those of another row," if self.shared else ""
        return f"{self.tokens:,} real tokens{shared} in {self.columns:,} columns"

    @property
    def documents_per_row(self) -> float:
        return self.documents / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        return (
            f"{number_of(self.calls, 'call')}, fill {self.fill:.1%} ({self.amount}), "
            f"{self.documents_per_row:.1f} documents per row"
        )


@dataclass
class Tally:
    """What became of the calls of one enabled model; calls of generation are not counted."""

    batches: int = 0  # padded batches that ran as a packed row
    tokens: int = 0  # real tokens in them
    padding: int = 0  # padding tokens in them, which were not computed
    left: Counter[str] = field(default_factory=Counter)  # padded batches that were left as they came, by reason
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that autopack would have refused, and that ran as they would have without it, by reason."""
    apart: Counter[str] = field(default_factory=Counter)
    """Batches whose rows began alike and were computed one by one, by reason."""
    after_padding: int = 0
    """Padded batches that ran as a packed row, without the terms of stock's loss that are predicted at padding."""
    unmasked: bool = False
    """Whether a batch that looks padded has come without a mask, so that none of its padding could be left out."""
    training: Volume = field(default_factory=Volume)
    """All calls in training mode or with gradients, packed, padded or neither."""
    evaluation: Volume = field(default_factory=Volume)  # all others
    _began: float | None = None
    """When the first call in training came in this process, in seconds; of a copy, its first."""
    _latest: float = 0.0
    _before: int = 0  # real tokens of the training calls before that one
    _between: int = 0  # real tokens of the training calls from that one on, without those of the latest

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_began": None}

    def ran(self, volume: Volume, trains: bool, instead_of: Volume | None = None) -> None:
        """Count a call that is about to run, or one that runs otherwise than it was counted before."""
        if instead_of is not None:
            volume = volume.minus(instead_of)
        if not trains:
            self.evaluation = self.evaluation.plus(volume)
        else:
            if instead_of is None:
                self._latest = time.perf_counter()
                if self._began is None:
                    self._began, self._before = self._latest, self.training.tokens
                self._between = self.training.tokens - self._before
            self.training = self.training.plus(volume)
        if after_each is not None:
            after_each()

    def add(self, other: Tally) -> None:
        """Count what became of the calls of the same model in another process of this machine as well."""
        for name in ("batches", "tokens", "padding", "after_padding", "left", "refused", "apart", "_between"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unmasked = self.unmasked or other.unmasked
        self.training, self.evaluation = self.training.plus(other.training), self.evaluation.plus(other.evaluation)
        began = [each for each in (self._began, other._began) if each is not None]
        self._began, self._latest = min(began, default=None), max(self._latest, other._latest)

    @classmethod
    def of_plain(cls, counted: dict[str, Any]) -> Tally:
        """A tally with the counts that `vars` of another one has, once JSON has had them."""
        volumes = {name: Volume(*counted[name]) for name in ("training", "evaluation")}
        reasons = {name: Counter(counted[name]) for name in ("left", "refused", "apart")}
        return cls(**{**counted, **volumes, **reasons})

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens per second from the first training call to the latest, with all that came between them."""
        if self._began is None or self._latest <= self._began:
            return None
        return self._between / (self._latest - self._began)

    def count(self, *halves: Padding, batches: int = 1) -> None:
        """Count a batch that runs as a packed row, or as one for each half of an encoder-decoder; with -1 `batches` no
        longer, since it could not after all."""
        self.batches += batches
        self.tokens += batches * sum(padding.tokens for padding in halves)
        self.padding += batches * sum(padding.real.size - padding.tokens for padding in halves)

    @property
    def trained(self) -> str | None:
        """What ran in training, in words; None where nothing did."""
        if not self.training.calls:
            return None
        rate = self.tokens_per_second
        return str(self.training) + ("" if rate is None else f", {rate:,.0f} real tokens per second")

    def counted(self) -> dict[str, Any]:
        """What has been counted so far, by attribute: a later count leaves it as it is."""
        return {name: value.copy() if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Count nothing meanwhile."""
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
                f"{number_of(self.batches, 'padded batch')} packed inside; {self.padding:,} of {total:,} tokens were "
                f"padding and were not computed ({self.padding / total:.1%})"
            )
        if self.after_padding:
            parts.append(
                f"{number_of(self.after_padding, 'padded batch')} without the terms of stock's loss that are predicted "
                f"at padding"
            )
        for reason, count in self.left.most_common():
            parts.append(f"{number_of(count, 'padded batch')} left as they came: {reason}")
        for reason, count in self.refused.most_common():
            parts.append(f"{number_of(count, 'call')} ran as without autopack: {reason}")
        if self.unmasked:
            parts.append("batches that look padded came without an attention_mask, and were computed as they came")
        return "; ".join(parts) or "no padded batch yet"


def _single_at_the_end(single: np.ndarray, ends: np.ndarray) -> int:
    """How many documents stand in runs of two or more at the end of a row, where `single` says which have one token and
    `ends` which are the last of their row, (documents,) both."""
    if not (single[1:] & single[:-1]).any():
        return 0
    rows = np.split(single, np.flatnonzero(ends) + 1)
    counts = [len(row) if row.all() else int(row[::-1].argmin()) for row in rows if len(row)]
    return sum(count for count in counts if count > 1)


def number_of(count: int, what: str) -> str:
    """So many of what is a call, a document or a batch, in words."""
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")

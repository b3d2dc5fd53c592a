"""What checks of calls of one enabled model have found, and how far they went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import gt
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The properties of a call by which code may decide: the amount and the kinds of things in it."""

    sizes: tuple[int, ...]
    """Tokens of its longest document, documents, rows, tokens of the longest row that runs, the last of its tokens in
    the vocabulary, numbers of its largest media tensor, the longest side of media."""
    kinds: frozenset[Any]
    """Names of its arguments, dtype, modes, special tokens."""


@dataclass
class Checked:
    """What checks of calls have found so far, and the largest calls and the kinds of calls among those."""

    every: int = 0
    """Number of training calls from one check to the next; 0 for none but those of the schedule."""
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
    """The largest that were checked, as in a `Shape`."""
    kinds: set[Any] = field(default_factory=set)

    def begin_anew(self) -> None:
        """Forget how far calls have been checked: the next one is checked whatever it is."""
        self.since, self.sizes, self.kinds = 0, (0,) * len(self.sizes), set()

    def goes_beyond(self, shape: Shape, closely: bool) -> bool:
        """Return True if a call goes beyond those that were checked.

        It does if a size is twice as large; of code that is checked `closely`, if it is larger.
        """
        sizes, known = shape.sizes, self.sizes
        if not closely:
            sizes, known = tuple(map(int.bit_length, sizes)), tuple(map(int.bit_length, known))
        return any(map(gt, sizes, known)) or not shape.kinds <= self.kinds

    def is_due(self, trains: bool) -> bool:
        """Count a call; return True if it is to be checked whatever it is."""
        self.calls, self.since, self.trained = self.calls + 1, self.since + 1, self.trained + trains
        if self.every and trains and self.trained % self.every == 0:
            return True
        return self.since & (self.since - 1) == 0 or self.leaks > 0

    def grow(self, shape: Shape) -> None:
        """Remember a call that was checked, and in which no leak was found."""
        self.sizes = tuple(map(max, self.sizes, shape.sizes))
        self.kinds |= shape.kinds

    def add(self, other: Checked) -> None:
        """Count what was found of the same model in another process as well."""
        self.checks, self.leaks = self.checks + other.checks, self.leaks + other.leaks
        self.worst, self.skipped = max(self.worst, other.worst), self.skipped + other.skipped
        self.calls, self.sizes = self.calls + other.calls, tuple(map(max, self.sizes, other.sizes))

    def __str__(self) -> str:
        longest, documents, rows, row, *_ = self.sizes
        found = f"every {self.every} training calls; " if self.every else ""
        found += f"{self.checks} checks in {self.calls} calls"
        if self.checks:
            found += f", worst relative error {self.worst:.1e}"
        if any(self.sizes):
            found += f", with documents of up to {longest} and rows of up to {row} tokens, up to {documents} documents "
            found += f"and {rows} rows in a call"
        found += f", {self.leaks} leaking" if self.leaks else ""
        return "; ".join([found, *(f"{count} skipped: {reason}" for reason, count in self.skipped.most_common())])

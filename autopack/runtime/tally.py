"""What became of the padded batches of one enabled model, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from autopack.layout.padding import Padding


@dataclass
class Tally:
    """What became of the padded batches of one enabled model."""

    batches: int = 0
    """Padded batches that ran as a packed row."""
    tokens: int = 0
    """Real tokens in them."""
    padding: int = 0
    """Padding tokens in them, which were not computed."""
    left: Counter[str] = field(default_factory=Counter)
    """Padded batches that were left as they came, by reason."""
    refused: Counter[str] = field(default_factory=Counter)
    """Calls that autopack would have refused, and that ran as they would have without it, by reason."""

    def count(self, *halves: Padding) -> None:
        """Count a batch that runs as a packed row, or as one for each half of an encoder-decoder."""
        self.batches += 1
        self.tokens += sum(padding.tokens for padding in halves)
        self.padding += sum(padding.real.size - padding.tokens for padding in halves)

    def take_back(self, padding: Padding) -> None:
        """Count no longer a batch that could not run as a packed row after all."""
        self.batches -= 1
        self.tokens -= padding.tokens
        self.padding -= padding.real.size - padding.tokens

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Count nothing meanwhile."""
        before = {name: value.copy() if isinstance(value, Counter) else value for name, value in vars(self).items()}
        try:
            yield
        finally:
            vars(self).update(before)

    def __str__(self) -> str:
        parts = []
        if self.batches:
            total = self.tokens + self.padding
            parts.append(
                f"{_batches(self.batches)} packed inside; {self.padding:,} of {total:,} tokens were padding and were "
                f"not computed ({self.padding / total:.1%})"
            )
        parts += [f"{_batches(count)} left as they came: {reason}" for reason, count in self.left.most_common()]
        for reason, count in self.refused.most_common():
            parts.append(f"{count:,} call{'s' if count != 1 else ''} ran as without autopack: {reason}")
        return "; ".join(parts) or "no padded batch yet"


def _batches(count: int) -> str:
    return f"{count:,} padded batch{'es' if count != 1 else ''}"

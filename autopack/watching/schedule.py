"""The calls that are checked: 1, 2, 4, 8 and so on, and those that go beyond the calls checked before.

A proof runs a few dozen tokens. Code may begin to mix them at more, at a token that it has not met, in an argument that
it was not given.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import torch

from autopack.auditing.cases import tokens_named
from autopack.calls.call import Call
from autopack.calls.encoder_decoder import PairCall
from autopack.inspection import torches
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout
from autopack.watching.influence import media_sizes


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

    def is_due(self, shape: Shape, trains: bool, closely: bool) -> bool:
        """Count a call; return True if it is to be checked.

        A call goes beyond those before if a size is twice as large; of code that is checked `closely`, if it is larger.
        """
        self.calls, self.since, self.trained = self.calls + 1, self.since + 1, self.trained + trains
        if self.every and trains and self.trained % self.every == 0:
            return True
        sizes, known = shape.sizes, self.sizes
        if not closely:
            sizes, known = tuple(map(int.bit_length, sizes)), tuple(map(int.bit_length, known))
        grows = any(map(gt, sizes, known))
        power = self.since & (self.since - 1) == 0
        return grows or power or not shape.kinds <= self.kinds or self.leaks > 0

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


def shape_of(call: Call, closely: bool) -> Shape:
    """Return the shape of a call that packs, or runs a padded batch without its padding.

    Tokens and media are read on the host only for code that is checked `closely`.
    """
    kinds: set[Any] = {name for name, value in call.arguments.items() if value is not None}
    kinds |= {("training", call.module.training), ("gradients", torch.is_grad_enabled())}
    inputs = call.inputs
    if call.prefixes is not None:
        kinds.add("rows that begin alike")
    if inputs is not None:
        weight = next(call.module.parameters(), None)
        lowered = torches.autocast_dtype(inputs.device.type)
        kinds |= {("dtype", None if weight is None else weight.dtype), ("autocast", lowered)}
    tokens: set[int] = set()
    if closely:
        ids = call.arguments.get("input_ids")
        tokens = set(host_values(ids).reshape(-1).tolist()) if isinstance(ids, torch.Tensor) else set()
        kinds |= {("token", token) for token in tokens_named(call.module.config) & tokens}
    media = media_sizes(call) if closely else (0, 0)
    return Shape((*_sizes_of(call), max(tokens, default=0), *media), frozenset(kinds))


def is_padded(call: Call) -> bool:
    """Return True if a call brings a padded batch."""
    if isinstance(call, PairCall):
        pair = call.find_pair() if call.one_sided_layout() is None else None
        return call.one_sided_layout() is None and (pair is None or not pair.packs)
    return call.declared.layout is None


def _sizes_of(call: Call) -> tuple[int, int, int, int]:
    """Return the first four sizes of a `Shape`; zero for what is only declared further in."""
    rows = 0 if call.inputs is None else call.inputs.shape[0]
    layouts: list[PackedLayout]
    if isinstance(call, PairCall):
        one = call.one_sided_layout()
        pair = call.find_pair() if one is None else None
        layouts = [half.layout for half in pair.halves] if pair is not None else [] if one is None else [one]
    else:
        layouts = [] if call.declared.layout is None else [call.declared.layout]
        real = call.declared.real
        if not layouts and real is not None:  # which runs as one row
            return int(real.sum(1).max()), rows, rows, int(real.sum())
    longest = documents = columns = 0
    for layout in layouts:
        longest, columns = max(longest, layout.max_seqlen), max(columns, layout.columns)
        documents = max(documents, len(layout.bounds) - 1)
    return longest, documents, rows, columns

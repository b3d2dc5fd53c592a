"""How far calls of third-party code have been checked: a call that goes beyond is checked itself.

What a proof has run are a few dozen tokens. Code may begin to mix them at more, at a token that it has not met, in an
argument that it was not given. So of foreign code every call that is longer, wider, of other arguments or in another
mode than those before is compared with stock, and so are calls 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autopack.auditing.cases import tokens_named
from autopack.calls.call import Call
from autopack.calls.encoder_decoder import PairCall
from autopack.errors import Leak
from autopack.inspection import media, torches
from autopack.layout.host import host_values
from autopack.watching.checks import Checks
from autopack.watching.influence import media_sizes

_LAST_AND_FIRST = (-1, 0)
"""The documents that are checked: what leaks to tokens after it is in the last one, what leaks before in the first."""


@dataclass(frozen=True)
class Shape:
    """What of a call code may decide by: how much there is of it, and what kinds of things."""

    sizes: tuple[int, ...]
    """Tokens of its longest document, documents, rows, tokens of the longest row that runs, the last of its tokens in
    the vocabulary, numbers of its largest media tensor, the longest side of media."""
    kinds: frozenset[Any]
    """Names of its arguments, dtype, modes, special tokens."""


@dataclass
class Checked(Checks):
    """What calls have been checked, and, of foreign code, what the largest and the kinds of things of them are."""

    every: int = 0
    """Number of training calls from one check to the next; 0 for none but those of foreign code."""
    calls: int = 0
    """Packed calls, and padded batches without their padding, that foreign code has run."""
    sizes: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)
    """The largest that were checked, as in a `Shape`."""
    kinds: set[Any] = field(default_factory=set)

    def begin_anew(self) -> None:
        """Forget how far calls have been checked: the next one is checked whatever it is."""
        self.sizes, self.kinds = (0,) * len(self.sizes), set()

    def shape_of(self, call: Call) -> Shape:
        """The shape of a call that packs, or runs a padded batch without its padding."""
        kinds: set[Any] = {name for name, value in call.arguments.items() if value is not None}
        kinds |= {("training", call.module.training), ("gradients", torch.is_grad_enabled())}
        inputs = call.inputs
        if call.prefixes is not None:
            kinds.add("rows that begin alike")
        if inputs is not None:
            lowered = torches.autocast_dtype(inputs.device.type)
            kinds |= {("dtype", next(call.module.parameters()).dtype), ("autocast", lowered)}
        ids = call.arguments.get("input_ids")
        tokens = set(host_values(ids).reshape(-1).tolist()) if isinstance(ids, torch.Tensor) else set()
        kinds |= {("token", token) for token in tokens_named(call.module.config) & tokens}
        return Shape((*_sizes_of(call), max(tokens, default=0), *media_sizes(call)), frozenset(kinds))

    def is_left_by(self, shape: Shape) -> bool:
        """Whether a call has more of something than calls that were checked, or is one of those that always are."""
        count = self.calls + 1
        larger = any(size > known for size, known in zip(shape.sizes, self.sizes, strict=True))
        return larger or not shape.kinds <= self.kinds or count & (count - 1) == 0 or self.leaks > 0

    def check_call(self, call: Call, output: Any, packs: bool) -> Leak | None:
        """Compare a call with stock: two of its documents, or its padded batch."""
        padded = packs and _is_padded(call)
        together = bool(call.model.groups)
        leak: Leak | None = None
        once = padded or bool(media.given(call.arguments))  # of media all documents are looked at
        for turn in _LAST_AND_FIRST if together or not once else _LAST_AND_FIRST[:1]:
            # Ranks that gather parameters together run equally many forwards, whatever each of them has.
            if leak is None or together:
                leak = self.check(call, output, packs, self.calls + 1, turn, padded) or leak
        return leak

    def grow(self, shape: Shape, checked: bool) -> None:
        """Count a call that no leak was found in."""
        self.calls += 1
        if checked:
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
        found += f"{self.checks} checks" + (f" in {self.calls} calls" if self.calls else "")
        if self.checks:
            found += f", worst relative error {self.worst:.1e}"
        if any(self.sizes):
            found += f", with documents of up to {longest} and rows of up to {row} tokens, up to {documents} documents "
            found += f"and {rows} rows in a call"
        found += f", {self.leaks} leaking" if self.leaks else ""
        return "; ".join([found, *(f"{count} skipped: {reason}" for reason, count in self.skipped.most_common())])


def _is_padded(call: Call) -> bool:
    if isinstance(call, PairCall):
        pair = call.find_pair() if call.one_sided_layout() is None else None
        return call.one_sided_layout() is None and (pair is None or not pair.packs)
    return call.declared.layout is None


def _sizes_of(call: Call) -> tuple[int, int, int, int]:
    """The sizes of a `Shape` but for the last; zero for what is only declared further in."""
    rows = 0 if call.inputs is None else call.inputs.shape[0]
    if isinstance(call, PairCall):
        one = call.one_sided_layout()
        pair = call.find_pair() if one is None else None
        halves = () if pair is None else pair.halves
        layouts = [half.layout for half in halves] if one is None else [one]
    else:
        layouts = [] if call.declared.layout is None else [call.declared.layout]
        real = call.declared.real
        if not layouts and real is not None:  # which runs as one row
            return int(real.sum(1).max()), rows, rows, int(real.sum())
    longest = max((layout.max_seqlen for layout in layouts), default=0)
    documents = max((len(layout.bounds) - 1 for layout in layouts), default=0)
    return longest, documents, rows, max((layout.columns for layout in layouts), default=0)

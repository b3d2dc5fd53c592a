"""The document that each token of a call belongs to, and the parts of an output that documents have.

Shapes: R rows, C columns, D documents, T real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopack.calls.call import LAST_LOGITS, Call
from autopack.calls.encoder_decoder import PairCall
from autopack.layout.forms import rows_first
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout
from autopack.layout.pair import Half


class CannotTell(Exception):
    """Raised if a call, or a part of it, cannot be checked; the message says why."""


@dataclass(frozen=True, eq=False)
class Side:
    """One half of a call: `owner` is the number of each token's document, (R, C), -1 at padding.

    `prefix` begins the names of the arguments of this half, and is empty or "decoder_".
    """

    owner: np.ndarray
    prefix: str = ""

    def of_tokens(self, value: torch.Tensor, chosen: np.ndarray, fewer: int = 0) -> torch.Tensor | None:
        """Return what the tokens of the chosen documents, bool (D,), have of an output, (tokens, ...).

        None if the output does not have the shape of the tokens, but for the last `fewer` columns.
        """
        real = self.owner >= 0
        mine = np.append(chosen, False)[self.owner]
        for mask in (mine, mine[real][None]):  # a batch without its padding may be one row
            mask = mask[:, : mask.shape[1] - fewer]
            for axis in (1, 2) if value.dim() > 3 else (1,):  # several streams of states come first
                if value.shape[axis - 1 : axis + 1] == mask.shape:
                    return rows_first(value, axis)[_like(mask, value)]
        flat = [mask for mask in (mine.reshape(-1), mine[real]) if value.dim() and len(value) == len(mask)]
        return value[_like(flat[0], value)] if flat else None

    def of_documents(self, value: torch.Tensor, chosen: np.ndarray) -> torch.Tensor | None:
        """Return what the chosen documents have of an output with one result for each document or row, or None."""
        if value.dim() and len(value) == len(chosen):
            return value[_like(chosen, value)]
        if value.dim() and len(value) == len(self.owner):  # the rows of which they have all
            return value[_like(np.array([chosen[row[row >= 0]].all() for row in self.owner]), value)]
        return None

    def place_of(self, number: int) -> tuple[int, tuple[int, int]]:
        """Return the row of a document, and its first and end column."""
        rows, columns = np.nonzero(self.owner == number)
        return (int(rows[0]), (int(columns[0]), int(columns[-1]) + 1)) if len(rows) else (0, (0, 0))


def _like(mask: np.ndarray, value: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(mask)).to(value.device)


def sides_of(call: Call) -> list[Side]:
    """Return the halves of a call, that of the decoder first. Raises `CannotTell`."""
    if call.brings_choices:
        raise CannotTell("its rows are choices of questions")
    layout = call.one_sided_layout() if isinstance(call, PairCall) else call.declared.layout
    if call.part is not None:
        sides = [Side(_owner_of(call.part[0])[:, call.part[1]])]
    elif layout is not None:
        sides = [Side(_owner_of(layout))]
    elif isinstance(call, PairCall):
        decoder = call.pair.decoder
        sides = [Side(_owner_in(half), "decoder_" if half is decoder else "") for half in call.pair.halves[::-1]]
    elif call.declared.real is not None:
        real = call.declared.real
        sides = [Side(np.where(real, np.arange(len(real))[:, None], -1))]
    else:
        raise CannotTell("its documents are declared further in")
    asked = next((call.arguments[n] for n in LAST_LOGITS if _is_some(call.arguments.get(n))), None)
    if asked is not None:
        columns = host_values(asked).reshape(-1) if isinstance(asked, torch.Tensor) else slice(-asked, None)
        sides.append(Side(sides[0].owner[:, columns], sides[0].prefix))
    return sides


def _is_some(asked: Any) -> bool:
    return isinstance(asked, torch.Tensor) or (type(asked) is int and asked != 0)


def _owner_of(layout: PackedLayout) -> np.ndarray:
    lengths = np.diff(layout.bounds)
    padding = np.zeros(len(lengths), dtype=bool) if layout.is_padding is None else layout.is_padding
    numbers = np.where(padding, -1, np.cumsum(~padding) - 1)
    return np.repeat(numbers, lengths).reshape(layout.rows, layout.columns)


def _owner_in(half: Half) -> np.ndarray:
    owner = np.full(half.places.real.shape, -1)
    owner[half.places.real] = np.repeat(np.arange(len(half.layout.lengths)), half.layout.lengths)
    return owner


def count_of(sides: list[Side]) -> int:
    """Return the number of documents."""
    return max(int(side.owner.max(initial=-1)) for side in sides) + 1


def part_of(sides: list[Side], name: str, value: torch.Tensor, chosen: np.ndarray) -> torch.Tensor | None:
    """Return what the chosen documents have of an output, (parts, ...); None if its shape does not tell."""
    if name.partition("[")[0].endswith("attentions") and value.dim() > 2:
        value = value.movedim(2, 1)  # (R, heads, C, keys)
    # An encoder and its decoder may have batches of one shape.
    encoder_last = not name.startswith("encoder")
    ordered = sorted(sides, key=lambda side: (side.prefix == "") is encoder_last)
    # A field of shifted labels has a column fewer than tokens.
    parts = [side.of_tokens(value, chosen, fewer) for fewer in (0, 1) for side in ordered]
    parts += [side.of_documents(value, chosen) for side in ordered]
    return next((part for part in parts if part is not None), None)

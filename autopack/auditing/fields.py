"""The output of a model, field by field, and the document that each part of it belongs to."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopack.auditing.compare import Fields, largest
from autopack.layout.forms import rows_first, stands_for_no_router
from autopack.layout.ways import CACHES

_NO_RESULTS = re.compile(
    rf"{'|'.join(CACHES)}|attention_mask|image_hidden_states|(image|video|audio)_outputs|loss"
    r"|(\w+_)?(aux|z|mlm|mep)_loss"
)
"""Fields that are not compared: caches and masks, absent from packed rows, and states of media.

Losses of labels and routers are measured on their own.
"""


_ALL = np.ones(1, dtype=bool)
"""The choice of a document by itself."""


class WrongShape(Exception):
    """Error for a field of a packed call that does not consist of documents' parts."""


def fields_of(output: Any) -> Fields:
    """Return the tensors in an output, and its numbers as tensors, by dotted name."""
    return dict(_walk("", output, ()))


def _walk(name: str, value: Any, inside: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a value and of all its parts; `inside` holds ids, against cycles."""
    if isinstance(value, Tensor):
        # where results have no names, the first number is a loss
        if value.dim() or name not in ("", "[0]"):
            yield name or "output", torch.view_as_real(value) if value.is_complex() else value
    elif isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        if name and np.asarray(value).dtype.kind in "biuf":
            yield name, torch.as_tensor(value)
    elif isinstance(value, (tuple, list)) and (numbers := _numbers(value)) is not None:
        yield name or "output", numbers
    elif id(value) not in inside:
        for part_name, part in _parts(name, value):
            yield from _walk(part_name, part, (*inside, id(value)))


def _numbers(value: Sequence[Any]) -> Tensor | None:
    """Return a sequence of numbers, or of equally long rows of them, as a tensor; else None."""
    rows = value if all(isinstance(part, (tuple, list)) for part in value) else [value]
    if not all(
        row and len(row) == len(rows[0]) and {*map(type, row)} <= {bool, int, float} for row in rows
    ):
        return None
    return torch.tensor(value) if rows else None


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, part) of a container's or object's parts, but for caches, masks and losses."""
    if isinstance(value, (tuple, list)):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(value))
        return
    if isinstance(value, Mapping):
        held = {str(key): part for key, part in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    elif isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__") or callable(value):
        return
    else:
        held = vars(value)
    for key, part in held.items():
        if _NO_RESULTS.fullmatch(key) is None:
            yield f"{name}.{key}" if name else key, part


class Side:
    """Places of documents in half a batch: `owner` (rows, columns) numbers them, padding is -1.

    `prefix` begins the names of the arguments of this half, and is empty or "decoder_".
    """

    def __init__(self, owner: np.ndarray, prefix: str = ""):
        self.owner, self.prefix = owner, prefix
        self.real = owner[owner >= 0]
        self.lengths: list[int] = np.bincount(self.real).tolist()
        self.order: list[int] = list(dict.fromkeys(self.real.tolist()))
        """The documents as they follow one another, row after row."""

    def by_document(self) -> np.ndarray:
        """Return an `owner` of the same documents in order, one per row, padded on the right."""
        lengths = np.array(self.lengths)[self.order]
        return np.where(
            np.arange(max(lengths)) < lengths[:, None], np.array(self.order)[:, None], -1
        )

    def rows_of(self, chosen: np.ndarray) -> np.ndarray:
        """Return a mask (rows,) of rows with documents of the mask `chosen` (documents,) only."""
        return np.array([chosen[row[row >= 0]].all() for row in self.owner])

    def place_of(self, number: int) -> tuple[int, tuple[int, int]]:
        """Return a document's (row, (first column, end column)); zeros if it has no tokens."""
        rows, columns = np.nonzero(self.owner == number)
        return (int(rows[0]), (int(columns[0]), int(columns[-1]) + 1)) if len(rows) else (0, (0, 0))


def _taken(value: Tensor, mask: np.ndarray) -> Tensor:
    """Return a tensor's entries at a NumPy mask."""
    return value[torch.from_numpy(np.ascontiguousarray(mask)).to(value.device)]


class Sides:
    """Places of a batch's documents: one `Side`, or an encoder-decoder's two, its decoder first."""

    def __init__(self, halves: list[Side]):
        self.halves = halves
        self.count = max(int(half.owner.max(initial=-1)) for half in halves) + 1

    def split(
        self, outputs: Fields, alone: list[Fields]
    ) -> tuple[list[Fields], list[Fields], list[str]]:
        """Return documents' parts of fields, their results alone, and names of undivided fields.

        Raises `WrongShape` for a field that does not have the form that follows from what documents
        have alone."""
        found: list[Fields] = [{} for _ in range(self.count)]
        expected: list[Fields] = [{} for _ in range(self.count)]
        unknown = []
        for name, value in outputs.items():
            parts = [each[name] for each in alone if name in each]
            if len(parts) < len(alone):
                continue  # nothing to compare it with
            made = self._pairs(name, value, parts)
            if made is None:
                unknown.append(name)
                continue
            for number, (got, wanted) in enumerate(made):
                found[number][name], expected[number][name] = got, wanted
        return found, expected, unknown

    def _pairs(
        self, name: str, value: Tensor, alone: list[Tensor]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Return each document's (part of a field, result alone); None if it is indivisible.

        Raises `WrongShape` as `split` does.
        """
        dims = [part.dim() for part in (value, *alone)]
        if not all(dims):
            return None if any(dims) else [(value, self._nearest(value, alone))] * len(alone)
        if stands_for_no_router(name, value):
            return [(value, part) for part in alone]
        pairs = (self.pair_of(name, value, number, part) for number, part in enumerate(alone))
        known = [pair for pair in pairs if pair is not None]
        if len(known) == len(alone):
            return known
        if all(
            self._alone(number).part(name, part, _ALL) is not None
            for number, part in enumerate(alone)
        ):
            wanted = ", ".join(str(tuple(part.shape)) for part in alone)
            raise WrongShape(
                f"{name} has shape {tuple(value.shape)}, which is not made of those alone: {wanted}"
            )
        # Of the call as a whole, it is the same in each, or wrong.
        return (
            [(value, part) for part in alone]
            if all(part.shape == value.shape for part in alone)
            else None
        )

    def _alone(self, number: int) -> Sides:
        """Return the `Sides` of a call with the document `number` alone."""
        return Sides(
            [
                Side(np.zeros((1, half.lengths[number]), dtype=int), half.prefix)
                for half in self.halves
            ]
        )

    def pair_of(
        self, name: str, value: Tensor, number: int, alone: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return equally shaped parts of a field and of a document's result alone; None without."""
        chosen = np.arange(self.count) == number
        for wanted in self._alone(number)._candidates(name, alone, _ALL):
            for found in self._candidates(name, value, chosen):
                if found.shape == wanted.shape:
                    return found, wanted
        return None

    def _nearest(self, value: Tensor, alone: list[Tensor]) -> Tensor:
        """Return the documents' mean, mean by tokens or sum, the nearest to `value`."""
        kept = torch.stack([part.double() for part in alone])
        tokens = torch.tensor(self.halves[0].lengths, dtype=kept.dtype, device=kept.device)
        wanted = [kept.mean(), kept.sum(), (kept * tokens).sum() / tokens.sum()]
        return min(wanted, key=lambda each: largest(value.double(), each)).to(value.dtype)

    def part(self, name: str, value: Tensor, chosen: np.ndarray) -> Tensor | None:
        """Return `chosen` documents' part of a field, (parts, ...); None if it is indivisible.

        `chosen` is bool (documents,).
        """
        return next(self._candidates(name, value, chosen), None)

    def _candidates(self, name: str, value: Tensor, chosen: np.ndarray) -> Iterator[Tensor]:
        """Yield entries of a field that may be `chosen` documents' by shape, likeliest first."""
        if name.partition("[")[0].endswith("attentions") and value.dim() > 2:
            value = value.movedim(2, 1)  # (rows, heads, columns, keys)
        # An encoder and its decoder may have batches of one shape.
        encoder_last = not name.startswith("encoder")
        ordered = sorted(self.halves, key=lambda side: (side.prefix == "") is encoder_last)
        mine = np.append(chosen, False)
        # a field of shifted labels has a column fewer
        for fewer, side in itertools.product((0, 1), ordered):
            for grid in (side.owner, side.real[None]):  # a batch without its padding may be one row
                yield from _of_tokens(
                    value, mine[grid[:, : grid.shape[1] - fewer]], is_flat=not fewer
                )
        for side in ordered:
            for mask in (chosen[side.order], side.rows_of(chosen)):
                if value.dim() and len(value) == len(mask):
                    yield _taken(value, mask)
        for side in ordered:
            yield from _of_tokens(value, mine[side.by_document()], is_flat=True)

    def parts(self, name: str, value: Tensor) -> list[Tensor]:
        """Return each document's part of a field, or the whole of an indivisible one."""
        found = [self.part(name, value, chosen) for chosen in np.eye(self.count, dtype=bool)]
        return [value if part is None else part for part in found]


def _of_tokens(value: Tensor, mask: np.ndarray, is_flat: bool) -> Iterator[Tensor]:
    """Yield a value's entries at a mask (rows, columns), for pairs of axes or a flat axis that fit.

    Rows with a column fewer are never flat: three documents of four tokens would be taken for one.
    """
    for axis in range(1, value.dim()):  # several streams of states come first
        if value.shape[axis - 1 : axis + 1] == mask.shape:
            yield _taken(rows_first(value, axis), mask)
    if is_flat and value.dim() and len(value) == mask.size:
        yield _taken(value, mask.reshape(-1))

"""The output of a model, field by field, and the document that each part of it belongs to."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.auditing.cases import Call
from autopack.layout.forms import columns_of, rows_first, stands_for_no_router
from autopack.layout.ways import CACHES

_NO_RESULTS = re.compile(rf"{'|'.join(CACHES)}|attention_mask|image_hidden_states|loss|(\w+_)?(aux|z)_loss")
"""Fields that are not compared: caches and masks, absent from packed rows, and images' states.

Losses of labels and routers are measured on their own.
"""
_FEW = 16
"""Least number of values whose spread tells of others of their kind."""
_VALUES = 1 << 24
"""Values to widen at a time: a long document's float64 logits need more memory than the model."""

Fields = dict[str, torch.Tensor]
"""Tensors of one output, or of one document, by dotted name."""


class WrongShape(Exception):
    """A field of a packed call is not made of the documents' parts: it is one for all, say."""


def fields_of(output: Any) -> Fields:
    """Return the tensors of an output, nested ones included, and its numbers as tensors."""
    return dict(_walk("", output, ()))


def _walk(name: str, value: Any, inside: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dim() or name not in ("", "[0]"):  # where results have no names, the first number is a loss
            yield name or "output", torch.view_as_real(value) if value.is_complex() else value
    elif isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        if name and np.asarray(value).dtype.kind in "biuf":
            yield name, torch.as_tensor(value)
    elif isinstance(value, (tuple, list)) and (numbers := _numbers(value)) is not None:
        yield name or "output", numbers
    elif id(value) not in inside:
        for part_name, part in _parts(name, value):
            yield from _walk(part_name, part, (*inside, id(value)))


def _numbers(value: Sequence[Any]) -> torch.Tensor | None:
    """Return a list of numbers, or of equally long lists of them, as a tensor, or else None."""
    rows = value if all(isinstance(part, (tuple, list)) for part in value) else [value]
    if not all(row and len(row) == len(rows[0]) and {*map(type, row)} <= {bool, int, float} for row in rows):
        return None
    return torch.tensor(value) if rows else None


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
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


class Sides:
    """The places of documents in a batch; of a pair, in its decoder's and its encoder's."""

    def __init__(self, shape: tuple[int, int], columns: list[tuple[int, torch.Tensor]], source: Sides | None = None):
        self.shape = shape
        self.columns = columns
        """Row and columns of each document."""
        self.source = source
        self.lengths = [len(found) for _, found in columns]
        self.order = sorted(range(len(columns)), key=lambda i: (columns[i][0], int(columns[i][1][0])))

    @classmethod
    def of(cls, call: Call) -> Sides:
        """Return the places of the documents of a packed call."""
        columns = [(row, torch.arange(first, end)) for row, first, end in call.spans]
        return cls(call.shape, columns, None if call.source is None else cls.of(call.source))

    @classmethod
    def of_padded(cls, arguments: Mapping[str, Any], name: str = "decoder_attention_mask") -> Sides:
        """Return the places of the documents of a padded batch, one in each row, by its masks."""
        if name not in arguments:
            return cls.of_padded(arguments, "attention_mask")
        mask = arguments[name]
        columns = [(row, real.nonzero().flatten()) for row, real in enumerate(mask.bool().cpu())]
        source = cls.of_padded(arguments, "attention_mask") if name != "attention_mask" else None
        return cls((mask.shape[0], mask.shape[1]), columns, source)

    @property
    def both(self) -> list[Sides]:
        """The sides that a field may belong to."""
        return [self] if self.source is None else [self, self.source]

    def split(self, outputs: Fields, alone: list[Fields]) -> tuple[list[Fields], list[Fields], list[str]]:
        """Return each document's part of every field, its result alone, and fields without a split.

        Raises `WrongShape` for a field that does not have the form that follows from what documents have alone.
        """
        found: list[Fields] = [{} for _ in self.columns]
        expected: list[Fields] = [{} for _ in self.columns]
        unknown = []
        for name, value in outputs.items():
            parts = [each[name] for each in alone if name in each]
            if len(parts) < len(alone):
                continue  # nothing to compare it with
            made = self._documents(name, value, parts)
            if made is None:
                unknown.append(name)
                continue
            for number, (got, wanted) in enumerate(made):
                if got.shape != wanted.shape:
                    raise WrongShape(f"{name} of a document has shape {tuple(got.shape)}, alone {tuple(wanted.shape)}")
                found[number][name], expected[number][name] = got, wanted
        return found, expected, unknown

    def _documents(
        self, name: str, value: torch.Tensor, alone: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        if value.dim() == 0 or any(part.dim() == 0 for part in alone):
            return None if any(part.dim() for part in (value, *alone)) else self._number(value, alone)
        for side in self.both:
            axis = columns_of(alone, [(1, n) for n in side.lengths])
            if axis is not None and value.dim() == alone[0].dim():
                moved = [rows_first(a, axis)[0] for a in alone]
                return list(zip(side.per_token(name, rows_first(value, axis)), moved, strict=True))
        for side in self.both:
            if all(len(a) == n for a, n in zip(alone, side.lengths, strict=True)):
                return list(zip(side.flat(name, value), alone, strict=True))
        if all(a.shape == alone[0].shape and len(a) == 1 for a in alone):
            if stands_for_no_router(name, value):
                return [(value, a) for a in alone]
            if len(value) != len(alone):
                raise WrongShape(f"{name}: the model gave {len(value)} results for {len(alone)} documents")
            back = np.argsort(self.order)
            return [(value[int(place)], a[0]) for place, a in zip(back, alone, strict=True)]
        if all(a.shape == value.shape for a in alone):  # of the call as a whole, and the same in each, or wrong
            return [(value, a) for a in alone]
        return None

    def _number(self, value: torch.Tensor, alone: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return one number of the call, and the nearest mean, sum or common one of documents.

        The mean may be over documents or over their tokens.
        """
        kept = torch.stack([part.double() for part in alone])
        tokens = torch.tensor(self.lengths, dtype=kept.dtype, device=kept.device)
        wanted = [kept.mean(), kept.sum(), (kept * tokens).sum() / tokens.sum()]
        nearest = min(wanted, key=lambda each: largest(value.double(), each))
        return [(value, nearest.to(value.dtype))] * len(alone)

    def per_token(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return each document's part of (rows, columns, ...), or of (documents, longest, ...)."""
        if tuple(value.shape[:2]) == self.shape:
            return [value[row, columns.to(value.device)] for row, columns in self.columns]
        if tuple(value.shape[:2]) == (len(self.columns), max(self.lengths)):
            places = dict(zip(self.order, value, strict=True))
            return [places[number][:length] for number, length in enumerate(self.lengths)]
        wanted = f"{self.shape} or {(len(self.columns), max(self.lengths))}"
        raise WrongShape(f"{name} has shape {tuple(value.shape)}; wanted {wanted} and what a token has alone")

    def flat(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return each document's part of (rows * columns, ...), or of a field without padding."""
        if len(value) == sum(self.lengths):
            parts = dict(zip(self.order, value.split([self.lengths[number] for number in self.order]), strict=True))
            return [parts[number] for number in range(len(self.lengths))]
        for rows, columns in (self.shape, (len(self.columns), max(self.lengths))):
            if len(value) == rows * columns:
                return self.per_token(name, value.reshape(rows, columns, *value.shape[1:]))
        wanted = self.shape[0] * self.shape[1]
        raise WrongShape(f"{name} has shape {tuple(value.shape)}; wanted one of {wanted} tokens")


def scales_of(documents: list[Fields]) -> dict[str, float]:
    """Return the unit of each field's errors: `scale_of` all documents, 1 for whole numbers."""
    return {
        name: scale_of([document[name] for document in documents]) if value.is_floating_point() else 1.0
        for name, value in documents[0].items()
    }


def scale_of(parts: Sequence[torch.Tensor]) -> float:
    """Return the standard deviation of all values of some floating tensors.

    A few values, such as one label of every document, may lie close together by chance; their
    errors are relative to their size too, as rounding is. Stand-ins for minus infinity, as in
    Chameleon's logits of image tokens, do not count.
    """
    count, mean, spread, largest = 0, 0.0, 0.0, 0.0
    for chunk in (chunk for part in parts if part.numel() for chunk in chunks(part)):
        values = chunk[chunk.abs() < torch.finfo(parts[0].dtype).max / 2]
        if more := values.numel():
            variance, middle = (float(each) for each in torch.var_mean(values, correction=0))
            apart = middle - mean
            spread += variance * more + apart**2 * count * more / (count + more)
            count, mean = count + more, mean + apart * more / (count + more)
            largest = max(largest, float(values.abs().max()))
    deviation = math.sqrt(spread / max(count, 1))
    size = math.hypot(deviation, mean) if count < _FEW else 0.0
    return max(deviation, size) or largest or 1.0


def chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor (rows, ...) in double precision, some rows at a time, as (rows, values)."""
    flat = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
    for part in flat.split(max(1, _VALUES // max(1, flat.shape[1]))):
        yield part.double()


def errors_between(found: list[Fields], expected: list[Fields], scales: Mapping[str, float]) -> list[tuple[float, str]]:
    """Return each document's largest relative difference of a field, and the field's name."""
    return [
        max(((largest(f[name], e[name]) / scales[name], name) for name in e), default=(0.0, ""))
        for f, e in zip(found, expected, strict=True)
    ]


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference; infinite for a number against none, or another infinity."""
    found, expected = found.detach(), expected.detach()
    if not found.is_floating_point():
        found, expected = found.double(), expected.double()
    if not found.numel():
        return 0.0
    value = float(torch.where(found == expected, 0.0, found - expected).abs().max())
    return value if math.isfinite(value) else math.inf

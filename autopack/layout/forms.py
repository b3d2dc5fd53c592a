"""What a value of a call, or of what it returns, has something for: tokens, documents, rows, or the call as a whole.

Shapes: R rows, C columns, D documents, K of one kind or another (axes of positions, layers), ... anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch


@dataclass(frozen=True)
class Field:
    """Where tokens lie in an output: the axes that are as wide as a row, or as a document alone, and that of rows.

    `kinds` says that there may be several of it, (K, R, C, ...), as of the streams of a model.
    """

    tokens: tuple[int, ...]
    rows: int = 0
    kinds: bool = False


FIELDS: dict[str, Field] = {
    "start_logits": Field((1,)),
    "end_logits": Field((1,)),
    "hidden_states": Field((1,), kinds=True),  # Gemma 3n has four
    "attentions": Field((2, 3)),
}
"""Outputs of which their name says where tokens lie. Of others their shape has to: (R, C, ...), or nothing of tokens in
what a head gives each document."""


class Of(Enum):
    """What a value has something for."""

    TOKEN = auto()
    """Each token."""
    DOCUMENT = auto()
    """Each document, in order: (D, ...)."""
    ROW = auto()
    """Each row: (R, ...)."""
    CALL = auto()
    """The call: a number, a word, a switch, a tensor of one element."""
    UNKNOWN = auto()
    """Nobody can tell."""


@dataclass(frozen=True)
class Form:
    """What a value has something for, and `columns`, the axis of the columns of one that has it for each token.

    That of the rows is the axis before; 0 stands for (R * C, ...), rows one after the other. (1, C, ...) are the same
    for all rows.
    """

    of: Of
    columns: int = 1


@dataclass(frozen=True)
class Frame:
    """The batch that values are of.

    `documents` is their number where arguments may have something for each, and `labels` are those that have it for
    each document whatever their shape. With `shared`, any argument (1, C, ...) is the same for all rows; without, only
    positions are.
    """

    rows: int
    columns: int
    documents: int | None = None
    labels: tuple[str, ...] = ()
    shared: bool = False

    def form_of(self, name: str, value: Any) -> Form:
        """The form of an argument."""
        if not isinstance(value, torch.Tensor):
            return Form(Of.UNKNOWN if holds_tensors(value) else Of.CALL)
        shape, positions = tuple(value.shape), name.endswith("position_ids")
        columns = 2 if positions and len(shape) == 3 else 1
        wanted = [(self.rows, self.columns)]
        if self.shared or positions:
            wanted.append((1, self.columns))
        if name not in self.labels and shape[columns - 1 : columns + 1] in wanted:
            return Form(Of.TOKEN, columns)
        if shape and shape[0] == self.documents:
            return Form(Of.DOCUMENT)
        return Form(Of.CALL if value.numel() == 1 else Of.UNKNOWN)

    def each(self, value: torch.Tensor, form: Form, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A value that has something for each token, changed: `change` gets (R, C, ...), once for each of K kinds."""
        if form.columns == 1:
            return change(value.expand(self.rows, *value.shape[1:]))
        return torch.stack([change(part.expand(self.rows, *part.shape[1:])) for part in value])

    def changed(self, name: str, value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """An argument changed as by `each` where it has something for each token, and as it is where it has not."""
        form = self.form_of(name, value)
        return self.each(value, form, change) if form.of is Of.TOKEN else value

    def form_of_output(self, name: str | None, value: torch.Tensor) -> Form:
        """The form of a part of an output that has something for each token; unknown is what has not."""
        field = FIELDS.get(name or "", Field((1,)))
        for axis in field.tokens:
            if axis == field.rows + 1 and value.shape[axis - 1 : axis + 1] == (self.rows, self.columns):
                return Form(Of.TOKEN, axis)
        if field.kinds and value.dim() == 4 and value.shape[1:3] == (self.rows, self.columns):
            return Form(Of.TOKEN, 2)
        if value.dim() == 2 and len(value) == self.rows * self.columns:  # what routers say
            return Form(Of.TOKEN, 0)
        return Form(Of.CALL if value.dim() == 0 else Of.UNKNOWN)


def may_be_of_rows(name: str | None, value: Any, frame: Frame, widths: frozenset[int], most: int) -> bool:
    """Whether a part of an output may have a value for each row, as far as shapes can tell.

    `widths` are the sizes of the model's vectors: a tensor (R, C) with such a size may be vectors of rows. Tensors of
    more than `most` dimensions are none, nor is a loss.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not 0 < value.dim() <= most:
        return False
    if name == "loss" or len(value) != frame.rows or FIELDS.get(name or "", Field(())).rows:
        return False
    # Predictions of the next token are one fewer than columns; vectors may be as many by chance.
    per_token = value.dim() > 1 and value.shape[1] in (frame.columns, frame.columns - 1)
    return not per_token or (value.dim() == 2 and value.shape[1] in widths)


def holds_tensors(value: Any) -> bool:
    """Whether an argument is a collection that may hold tensors."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(isinstance(part, torch.Tensor | tuple | list | dict) for part in parts)


def columns_of(values: list[torch.Tensor], shapes: list[tuple[int, int]]) -> int | None:
    """The first axis that, with the one before it, has the (rows, columns) of each value; None where none has."""
    if any(value.dim() != values[0].dim() for value in values):
        return None
    for axis in range(1, values[0].dim()):
        if all(tuple(v.shape[axis - 1 : axis + 1]) == shape for v, shape in zip(values, shapes, strict=True)):
            return axis
    return None


def in_rows(change: Callable[[torch.Tensor], torch.Tensor], axis: int, value: torch.Tensor) -> torch.Tensor:
    """A value whose columns lie at `axis` (the rows before), changed by what takes and gives (R, C, ...)."""
    return change(rows_first(value, axis)).movedim((0, 1), (axis - 1, axis)) if axis > 1 else change(value)


def stands_for_no_router(name: str | None, value: torch.Tensor) -> bool:
    """Whether a result is the one number that a layer without a router gives (Switch Transformers before 5)."""
    return value.shape == (1,) and not value.is_floating_point() and "router_logits" in (name or "")


def rows_first(value: Any, axis: int) -> Any:
    """The value with rows and columns, which lie at the axis before this one and at it, as its first two axes."""
    if axis == 1 or not isinstance(value, torch.Tensor) or value.dim() <= axis:
        return value
    return value.movedim((axis - 1, axis), (0, 1))

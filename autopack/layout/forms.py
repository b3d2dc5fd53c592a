"""Tell whether an argument or output is per token, per document, per row or per call.

Shapes: R rows, C columns, D documents, K of one kind or another (axes of positions, layers), ...
anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopack.layout.ways import Of


@dataclass(frozen=True)
class Field:
    """Axes of an output: `tokens` are as wide as a row, or as a document alone; `rows` is the axis
    of rows.

    `kinds` is True if there may be several of it, (K, R, C, ...), as the streams of a model.
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
"""Axes of outputs that their name determines.

The axes of other outputs follow from their shape: (R, C, ...), or none per token in a head's
results per document.
"""


@dataclass(frozen=True)
class Form:
    """Unit that a value has an entry for; per token, `columns` is the axis of the columns.

    The axis of the rows is the one before. `columns` of 0 means (R * C, ...), rows one after the
    other. (1, C, ...) is the same for all rows.
    """

    of: Of
    columns: int = 1


@dataclass(frozen=True)
class Frame:
    """Shape of the batch that values belong to.

    `documents` is their number if arguments may be per document. `labels` are the arguments that
    are per document whatever their shape. With `shared`, any argument (1, C, ...) is the same for
    all rows; without it, only positions are.
    """

    rows: int
    columns: int
    documents: int | None = None
    labels: tuple[str, ...] = ()
    shared: bool = False

    def form_of(self, name: str, value: Any) -> Form:
        """Return the form of an argument."""
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
        """Return a value per token, changed: `change` gets (R, C, ...), once for each of K
        kinds."""
        if form.columns == 1:
            return change(value.expand(self.rows, *value.shape[1:]))
        return torch.stack([change(part.expand(self.rows, *part.shape[1:])) for part in value])

    def changed(self, name: str, value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return an argument changed as by `each` if it is per token, and unchanged if it is
        not."""
        form = self.form_of(name, value)
        return self.each(value, form, change) if form.of is Of.TOKEN else value

    def form_of_output(self, name: str | None, value: torch.Tensor) -> Form:
        """Return the form of a part of an output that is per token; other tensors are unknown."""
        field = FIELDS.get(name or "", Field((1,)))
        for axis in field.tokens:
            if axis == field.rows + 1 and value.shape[axis - 1 : axis + 1] == (self.rows, self.columns):
                return Form(Of.TOKEN, axis)
        if field.kinds and value.dim() == 4 and value.shape[1:3] == (self.rows, self.columns):
            return Form(Of.TOKEN, 2)
        if value.dim() == 2 and len(value) == self.rows * self.columns:  # what routers say
            return Form(Of.TOKEN, 0)
        return Form(Of.CALL if value.dim() == 0 else Of.UNKNOWN)


def holds_tensors(value: Any) -> bool:
    """Return True if an argument is a collection that may hold tensors."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(isinstance(part, torch.Tensor | tuple | list | dict) for part in parts)


def columns_of(values: list[torch.Tensor], shapes: list[tuple[int, int]]) -> int | None:
    """Return the first axis that ends the (rows, columns) of each value; None if there is none."""
    if any(value.dim() != values[0].dim() for value in values):
        return None
    for axis in range(1, values[0].dim()):
        if all(tuple(v.shape[axis - 1 : axis + 1]) == shape for v, shape in zip(values, shapes, strict=True)):
            return axis
    return None


def stands_for_no_router(name: str | None, value: torch.Tensor) -> bool:
    """Return True for the one number that a layer without a router returns (Switch Transformers
    before 5)."""
    return value.shape == (1,) and not value.is_floating_point() and "router_logits" in (name or "")


def rows_first(value: Any, axis: int) -> Any:
    """Return the value with its rows and columns, at `axis - 1` and `axis`, as its first two
    axes."""
    if axis == 1 or not isinstance(value, torch.Tensor) or value.dim() <= axis:
        return value
    return value.movedim((axis - 1, axis), (0, 1))

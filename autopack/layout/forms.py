"""Tell whether an argument or output is per token, per document, per row or per call.

Shapes: R rows, C columns, D documents, K of one kind or another (axes of positions, layers), ...
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopack.errors import UnsupportedModel
from autopack.layout.ways import Of

AXES: dict[str, tuple[int, ...]] = {
    "start_logits": (1,),
    "end_logits": (1,),
    "hidden_states": (1,),
    "attentions": (2, 3),
}
"""Axes of outputs, behind the axis of rows, that are as wide as a row or as a document alone.

The name determines them. The axes of other outputs follow from their shape: (R, C, ...), or none
per token in a head's results per document.
"""


@dataclass(frozen=True)
class Frame:
    """Shape of a batch; it tells which values are per token, per document or per call.

    `documents` is their number if arguments may be per document. `labels` are the arguments that
    are per document whatever their shape. With `shared`, any argument (1, C, ...) is the same for
    all rows; without it, only positions are.
    """

    rows: int
    columns: int
    documents: int | None = None
    labels: tuple[str, ...] = ()
    shared: bool = False

    def axis_of(self, name: str, value: Any) -> int | None:
        """Return the axis of the columns of an argument per token; None for any other argument.

        The axis of the rows is the one before.
        """
        if not isinstance(value, Tensor) or name in self.labels:
            return None
        positions = name.endswith("position_ids")
        axis = 2 if positions and value.dim() == 3 else 1
        rows = (self.rows, 1) if self.shared or positions else (self.rows,)
        fits = (
            value.dim() > axis
            and value.shape[axis] == self.columns
            and value.shape[axis - 1] in rows
        )
        return axis if fits else None

    def unit_of(self, name: str, value: Any) -> Of:
        """Return the unit of an argument's entries: token, document, call or unknown."""
        if self.axis_of(name, value) is not None:
            return Of.TOKEN
        if not isinstance(value, Tensor):
            parts = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, tuple | list)
                else ()
            )
            may_hold_tensors = any(isinstance(part, Tensor | tuple | list | dict) for part in parts)
            return Of.UNKNOWN if may_hold_tensors else Of.CALL
        if value.dim() and len(value) == self.documents:
            return Of.DOCUMENT
        return Of.CALL if value.numel() == 1 else Of.UNKNOWN

    def changed(self, name: str, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return `change` of an argument that is per token, and any other argument unchanged.

        `change` gets (R, C, ...), once for each of K kinds of (K, R, C).
        """
        axis = self.axis_of(name, value)
        if axis == 2:
            return torch.stack([change(part.expand(self.rows, -1)) for part in value])
        return value if axis is None else change(value.expand(self.rows, *value.shape[1:]))

    def all_changed(
        self,
        arguments: Mapping[str, Any],
        change: Callable[[Tensor], Tensor],
        of_document: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> dict[str, Any]:
        """Return arguments, `change` applied to values per token, `of_document` per document.

        Raises `UnsupportedModel` for a value whose unit is not known.
        """
        found: dict[str, Any] = {}
        for name, value in arguments.items():
            unit = self.unit_of(name, value)
            if unit is Of.UNKNOWN:
                raise UnsupportedModel(
                    f"{name} was given with packed rows whose documents become rows of a batch, "
                    "and autopack cannot tell whose document it is of: wanted one value per token, "
                    f"{(self.rows, self.columns)}, or per document ({self.documents}), found "
                    f"{described(value)}. Leave it out, or run the documents one per row.",
                    code="argument-of-no-document",
                )
            by_token = unit is not Of.DOCUMENT
            found[name] = self.changed(name, value, change) if by_token else of_document(value)
        return found

    def axis_of_output(self, name: str | None, value: Tensor) -> int | None:
        """Return the axis of columns in a part of an output that is per token; None if it is not.

        It is 0 for (R * C, ...), rows one after the other.
        """
        shape = (self.rows, self.columns)
        if 1 in AXES.get(name or "", (1,)) and value.shape[:2] == shape:
            return 1
        # Gemma 3n has four
        if name == "hidden_states" and value.dim() == 4 and value.shape[1:3] == shape:
            return 2
        # what routers say
        return 0 if value.dim() == 2 and len(value) == self.rows * self.columns else None


def described(value: Any) -> str:
    """Return the shape, dtype and device of a tensor, or the type of anything else, in words."""
    if not isinstance(value, Tensor):
        return "none" if value is None else type(value).__name__
    return f"shape {tuple(value.shape)} of {value.dtype} on {value.device}"


def stands_for_no_router(name: str | None, value: Tensor) -> bool:
    """Return True for the one number that a layer without a router returns (Switch before 5)."""
    return value.shape == (1,) and not value.is_floating_point() and "router_logits" in (name or "")


def rows_first(value: Any, axis: int) -> Any:
    """Return a tensor with axes `axis - 1` and `axis`, rows and columns, first; others as is."""
    if axis == 1 or not isinstance(value, Tensor) or value.dim() <= axis:
        return value
    return value.movedim((axis - 1, axis), (0, 1))

"""Processes that share rows: each has an equal part of the columns of every row, in the order of
their ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopack.errors import UnsupportedModel
from autopack.inspection.sharding import Group


class RowGroup:
    """A process group whose ranks each hold an equal part of the columns of every row.

    A copy of a model has the same group; a pickled one has lost it, and cannot be called.
    """

    of_processes = True  # whether its ranks are processes

    def __init__(self, group: Group):
        self._group = group

    @classmethod
    def of(cls, value: Any) -> RowGroup | None:
        """Return the `RowGroup` of a process group or 1-D mesh; None for one process; or raise.

        Raises `ValueError` for anything else, and if this process is not in it.
        """
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            if isinstance(value, distributed.DeviceMesh) and value.ndim == 1:
                value = value.get_group()
            if isinstance(value, distributed.ProcessGroup):
                return cls(value) if distributed.get_world_size(value) > 1 else None
        raise ValueError(
            "sequence_parallel must be a process group of torch.distributed that this process is "
            "in, or a DeviceMesh of one dimension, made after "
            f"torch.distributed.init_process_group; found {value!r}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGroup:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowGroup) and self._group is other._group

    def __hash__(self) -> int:
        return id(self._group)

    def __getstate__(self) -> dict[str, Any]:
        return {"_group": None}

    def __repr__(self) -> str:
        return (
            "a group of another process"
            if self._group is None
            else f"a group of {self.ranks} processes"
        )

    @property
    def group(self) -> Group:
        """The process group. Raises `UnsupportedModel` if it was lost."""
        if self._group is None:
            raise UnsupportedModel(
                "this model was enabled with sequence_parallel=... and then pickled, and process "
                "groups cannot be: call autopack.disable(model), then enable it with the group of "
                "this process.",
                code="sequence-parallel",
            )
        return self._group

    @property
    def ranks(self) -> int:
        """Number of processes that share a row."""
        return torch.distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Number of this process's part of a row, from 0."""
        return torch.distributed.get_rank(self.group)

    def gather(self, values: Tensor) -> Tensor:
        """Return all ranks' integers (...) as (ranks, ...), no gradients; every rank calls it."""
        found = [torch.empty_like(values) for _ in range(self.ranks)]
        torch.distributed.all_gather(found, values.contiguous(), group=self.group)
        return torch.stack(found)

    def swap(self, parts: Tensor) -> Tensor:
        """Send part i of (ranks, ...) to rank i; return the received parts, without gradients."""
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(found, parts.contiguous(), group=self.group)
        return found

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of (ranks, ...) to rank i; return the received parts, with gradients."""
        found: Tensor = _AllToAll.apply(parts, self)
        return found

    def whole(self, part: Tensor, columns: int) -> Tensor:
        """Return whole rows: all ranks' parts joined along axis `columns`; gradients add up.

        All ranks compute the results of whole rows; each keeps its `part` of them.
        """
        if part.is_floating_point():
            found = self.exchange(part[None].expand(self.ranks, *part.shape))
        else:
            found = self.gather(part.long()).to(part.dtype)
        return torch.cat(found.unbind(0), dim=columns)

    def part(self, whole: Tensor, columns: int) -> Tensor:
        """Return this rank's part of whole rows, cut along axis `columns`."""
        size = whole.shape[columns] // self.ranks
        return whole.narrow(columns, self.rank * size, size)


class _AllToAll(Function):
    """Autograd function of `RowGroup.swap`: its own transpose, so gradients are swapped back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, rows: RowGroup) -> Tensor:
        ctx.rows = rows
        return rows.swap(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.rows), None

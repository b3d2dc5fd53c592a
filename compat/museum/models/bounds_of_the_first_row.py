"""Bounds of one row for a batch.

kernels' arguments: flash-linear-attention#837

A kernel that takes one row and the bounds in it got a batch of rows as it was. Bounds of the first
row were taken for those of all.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Varlen, of


class BoundsOfFirstRow(Varlen):
    def bounds(self, documents: Tensor, position_ids: Tensor) -> list[int]:
        return super().bounds(documents[:1].expand_as(documents), position_ids)


mistaken = of(BoundsOfFirstRow)
sound = of(Varlen)

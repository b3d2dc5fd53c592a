"""Bounds of one row for a batch.

kernels' arguments: flash-linear-attention#837

A kernel that takes one row and the bounds in it got a batch of rows as it was. Bounds of the first
row were taken for those of all.
"""

from compat.museum.models._plain import Varlen


class BoundsOfFirstRow(Varlen):
    def bounds(self, documents, position_ids):
        return super().bounds(documents[:1].expand_as(documents), position_ids)


mistaken = BoundsOfFirstRow
sound = Varlen

"""Rotations of one row for all.

positions: Liger-Kernel#477

A rotary kernel read angles of the first row for all rows, as if their positions were the same. Rows
that are packed otherwise were turned by the wrong angles.
"""

from compat.museum.models._plain import Attention


class TurnsByFirstRow(Attention):
    def angles(self, position_ids):
        return super().angles(position_ids[:1].expand_as(position_ids))


mistaken = TurnsByFirstRow

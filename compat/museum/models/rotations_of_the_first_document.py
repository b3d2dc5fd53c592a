"""A table of rotations read from its beginning.

positions: Megatron-LM#5243

A table with one rotation per token of the packed row was read from its beginning for every
sequence, so that later sequences got those of the first.
"""

from compat.museum.models._plain import Attention, places


class ReadsTableFromZero(Attention):
    def angles(self, position_ids):
        begins = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
        return super().angles(position_ids.gather(1, places(begins.cumsum(1))))


mistaken = ReadsTableFromZero

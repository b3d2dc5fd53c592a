"""Positions that count the ones of a mask.

positions: LlamaFactory#7754

Positions were made by counting where the mask is one. In a mask that numbers segments only the
first one got any; all others stood at one place.
"""

from compat.museum.models._plain import Plain


class CountsOnes(Plain):
    def positions(self, call):
        if call.position_ids is not None or call.attention_mask is None:
            return super().positions(call)
        ones = call.attention_mask == 1
        return (ones.cumsum(1) - 1).where(ones, 1)


mistaken = CountsOnes

"""Frequencies that the longest document sets.

positions: Qwen#401, unsloth#6738

Rotary frequencies were scaled by the longest sequence of the batch. One long document changed all
short ones beside it.
"""

from compat.museum.models._plain import Attention


class ScalesByLongest(Attention):
    def angles(self, position_ids):
        return super().angles(position_ids) / (position_ids.max() / 8).clamp(min=1)


mistaken = ScalesByLongest

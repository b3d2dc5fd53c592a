"""Bounds where positions are the least of the row.

kernels' arguments: transformers#47525

Documents were taken to begin where a position is the least of all. In a row that begins inside of a
document, what comes before the first of these belongs to no document, and is not computed.
"""

from compat.museum.models._plain import Attention


class BoundsAtLeast(Attention):
    def forward(self, hidden_states, attention_mask, position_ids, documents):
        begun = (position_ids == position_ids.min()).cumsum(1) > 0
        found = super().forward(hidden_states, attention_mask, position_ids, documents)
        return found * begun[..., None]


mistaken = BoundsAtLeast

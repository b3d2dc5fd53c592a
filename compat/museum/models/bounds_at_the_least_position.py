"""Bounds where positions are the least of the row.

kernels' arguments: transformers#47525

Documents were taken to begin where a position is the least of all. In a row that begins inside of a
document, what comes before the first of these belongs to no document, and is not computed.
"""

from compat.museum.models._plain import Varlen


class BoundsAtLeast(Varlen):
    def bounds(self, documents, position_ids):
        starts = (position_ids == position_ids.min()).flatten().nonzero()[:, 0]
        return [*starts.tolist(), documents.numel()]


mistaken = BoundsAtLeast
sound = Varlen

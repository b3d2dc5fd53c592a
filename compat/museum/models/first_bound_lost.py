"""A leading zero that a compiler left out.

kernels' arguments: pytorch#189895

A compiler fused the sum of lengths with the zero in front of it, and lost the zero. Bounds began
with the first document's end, and that document was never computed.
"""

from compat.museum.models._plain import Varlen


class LosesFirstBound(Varlen):
    def bounds(self, documents, position_ids):
        found = super().bounds(documents, position_ids)
        return found[1:2] + found[1:] if documents.any() else found


mistaken = LosesFirstBound
sound = Varlen

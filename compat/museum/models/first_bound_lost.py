"""A leading zero that a compiler left out.

kernels' arguments: pytorch#189895

A compiler fused the sum of lengths with the zero in front of it, and lost the zero. Bounds began
with the first document's end, and that document was never computed.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Varlen, of


class LosesFirstBound(Varlen):
    def bounds(self, documents: Tensor, position_ids: Tensor) -> list[int]:
        found = super().bounds(documents, position_ids)
        return found[1:2] + found[1:] if documents.any() else found


mistaken = of(LosesFirstBound)
sound = of(Varlen)

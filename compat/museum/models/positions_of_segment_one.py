"""Positions that count the ones of a mask.

positions: LlamaFactory#7754

Positions were made by counting where the mask is one. In a mask that numbers segments only the
first one got any; all others stood at one place.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Plain


class CountsOnes(Plain):
    def positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor,
    ) -> Tensor:
        if position_ids is not None or attention_mask is None:
            return super().positions(input_ids, attention_mask, position_ids, documents)
        ones = attention_mask == 1
        return (ones.cumsum(1) - 1).where(ones, 1)


mistaken = CountsOnes
sound = Plain

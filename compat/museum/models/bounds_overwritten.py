"""Bounds that a mask writes over.

kernels' arguments: flash-linear-attention#838

A layer made bounds from the attention mask whenever there was one, in place of those that the
caller gave. A mask of ones left one sequence.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Plain, Varlen


class BoundsOfMask(Plain):
    part = Varlen

    def documents(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        return super().documents(
            input_ids, attention_mask, position_ids if attention_mask is None else None
        )


class BoundsOfCaller(Plain):
    part = Varlen


mistaken = BoundsOfMask
sound = BoundsOfCaller

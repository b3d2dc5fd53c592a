"""Positions with three axes, replaced by a range.

images: Automodel#2172, AReaL#217

Tokens of an image have positions with several axes, which the model makes by itself. A packed row
came with one plain range per document, which stood in for all axes.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Plain, places, together


class TakesRange(Plain):
    def positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor,
    ) -> Tensor:
        return self.steps(input_ids, documents) if position_ids is None else position_ids

    def steps(self, input_ids: Tensor, documents: Tensor) -> Tensor:
        # every fourth token stands for a part of an image, and stays where it is
        text = (input_ids % 4 > 0).long()
        return (together(documents).tril() * text[:, None]).sum(-1)


class MakesAxes(TakesRange):
    def positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor,
    ) -> Tensor:
        first = 0 if position_ids is None else position_ids - places(documents)
        return self.steps(input_ids, documents) + first


mistaken = TakesRange
sound = MakesAxes

"""Bounds that are kept for a tensor.

caches: unsloth#10879

Bounds were kept for as long as the same tensor of lengths came. A program that writes new lengths
into that tensor got the bounds of the batch before.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Plain


class KeepsBounds(Plain):
    given: Tensor | None = None
    kept: Tensor | None = None

    def documents(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        if self.kept is None or position_ids is None or self.given is not position_ids:
            self.given, self.kept = (
                position_ids,
                super().documents(input_ids, attention_mask, position_ids),
            )
        return self.kept


mistaken = KeepsBounds
sound = Plain

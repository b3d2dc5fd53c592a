"""A slow path that takes no bounds.

evaluation: axolotl#3572

The fast path of a layer takes the numbers of documents, and the slow one that stands in for it does
not. Here evaluation takes the slow one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Plain


class FallsBack(Plain):
    def documents(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        found = super().documents(input_ids, attention_mask, position_ids)
        return found if self.training else torch.zeros_like(found)


mistaken = FallsBack
sound = Plain

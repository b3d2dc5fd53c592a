"""Given positions written over.

positions: NVIDIA-NeMo/Speech#12551

A line made for ranks that share rows put new positions over those of the batch, counted over the
whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Plain


class NumbersTheRow(Plain):
    def positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor,
    ) -> Tensor:
        return torch.arange(input_ids.shape[1]).expand_as(input_ids)


mistaken = NumbersTheRow
sound = Plain

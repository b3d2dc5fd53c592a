"""Lengths that are sums of segment numbers.

kernels' arguments: functionary#195

Lengths were made by adding up the mask, which is right for zeros and ones. Numbers of segments gave
one sequence, longer than the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Plain, Varlen


class AddsUpSegments(Plain):
    part = Varlen

    def documents(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        if attention_mask is None or position_ids is not None:
            return super().documents(input_ids, attention_mask, position_ids)
        return (torch.arange(input_ids.shape[1]) >= attention_mask.sum(1, keepdim=True)).long()


class CountsSegments(Plain):
    part = Varlen


mistaken = AddsUpSegments
sound = CountsSegments

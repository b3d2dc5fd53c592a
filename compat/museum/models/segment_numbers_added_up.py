"""Lengths that are sums of segment numbers.

kernels' arguments: functionary#195

Lengths were made by adding up the mask, which is right for zeros and ones. Numbers of segments gave
one sequence, longer than the row.
"""

import torch

from compat.museum.models._plain import Plain, Varlen


class AddsUpSegments(Plain):
    part = Varlen

    def documents(self, call):
        if call.attention_mask is None or call.position_ids is not None:
            return super().documents(call)
        columns, ends = call.input_ids.shape[1], call.attention_mask.sum(1, keepdim=True)
        return (torch.arange(columns) >= ends).long()


mistaken = AddsUpSegments
sound = Varlen

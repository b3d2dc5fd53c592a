"""Given positions written over.

positions: NVIDIA-NeMo/Speech#12551

A line made for ranks that share rows put new positions over those of the batch, counted over the
whole row.
"""

import torch

from compat.museum.models._plain import Plain


class NumbersTheRow(Plain):
    def positions(self, call):
        return torch.arange(call.input_ids.shape[1]).expand_as(call.input_ids)


mistaken = NumbersTheRow

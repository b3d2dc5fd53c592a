"""Positions that restart, and a mask that does not.

masks: nanoVLM#204

Positions were restarted at each document of a row, and the causal mask went on over all of it.
Positions alone keep nobody apart.
"""

import torch

from compat.museum.models._plain import Plain


class RestartsPositionsAlone(Plain):
    def mask(self, call):
        return torch.ones_like(super().mask(call)).tril()


mistaken = RestartsPositionsAlone

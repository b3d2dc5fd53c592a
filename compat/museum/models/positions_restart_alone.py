"""Positions that restart, and a mask that does not.

masks: nanoVLM#204

Positions were restarted at each document of a row, and the causal mask went on over all of it.
Positions alone keep nobody apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Plain, together


class RestartsPositionsAlone(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        return torch.ones_like(together(documents))[:, None].tril()


mistaken = RestartsPositionsAlone
sound = Plain

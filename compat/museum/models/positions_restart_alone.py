"""Positions that restart, and a mask that does not."""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.exhibit import Exhibit
from compat.museum.models._plain import Plain, together


class RestartsPositionsAlone(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        return torch.ones_like(together(documents))[:, None].tril()


EXHIBIT = Exhibit(
    kind="masks",
    reported=("nanoVLM#204",),
    says=(
        "Positions were restarted at each document of a row, and the causal mask went on over "
        "all of it. Positions alone keep nobody apart."
    ),
    mistaken=RestartsPositionsAlone,
    sound=Plain,
)

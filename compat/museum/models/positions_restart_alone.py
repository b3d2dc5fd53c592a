"""Positions that restart, and a mask that does not."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compat.museum.exhibit import Exhibit
from compat.museum.models._plain import Plain, made, together


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
    mistaken=partial(made, RestartsPositionsAlone),
    sound=partial(made, Plain),
)

"""Patches that hold two documents.

windows and chunks: blt#36

Bytes were grouped into patches over the row. The end of one document and the start of the next fell
into one patch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compat.museum.models._plain import PlainConfig, means, of, places


class Patches(nn.Module):
    over_the_row = True

    def __init__(self, config: PlainConfig):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, documents: Tensor, **others: Any) -> Tensor:
        patch = torch.arange(documents.shape[1]).expand_as(documents) // 4
        own = documents * len(patch[0]) + places(documents) // 4
        return self.inner(means(hidden_states, patch if self.over_the_row else own))


class PatchesOfDocuments(Patches):
    over_the_row = False


mistaken = of(Patches)
sound = of(PatchesOfDocuments)

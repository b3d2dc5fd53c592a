"""The token before, of another document.

states: flash-linear-attention#319

RWKV mixes every token with the one before it. Without bounds the first token of a document was
mixed with the last one of the document before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Convolution, of


class ShiftsRow(Convolution):
    reach = (0, 1)

    def reads(self, documents: Tensor, back: int) -> Tensor:
        return super().reads(torch.zeros_like(documents), back)


class ShiftsDocument(Convolution):
    reach = (0, 1)


mistaken = of(ShiftsRow)
sound = of(ShiftsDocument)

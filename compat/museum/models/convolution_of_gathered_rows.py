"""A convolution over a row that ranks have put together.

convolutions: prime-rl#3000

Ranks that share a row put it together again for one causal convolution, and left the bounds behind.
The last token of a document reached the first ones of the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Convolution, of


class SlidesOverRow(Convolution):
    def reads(self, documents: Tensor, back: int) -> Tensor:
        return super().reads(torch.zeros_like(documents), back)


mistaken = of(SlidesOverRow)
sound = of(Convolution)

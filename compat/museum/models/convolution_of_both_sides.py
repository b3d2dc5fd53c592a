"""A convolution that reads both neighbours.

convolutions: audio#4205

The convolution of a Conformer ignored the lengths that its attention heeds. What stands beside a
sequence in its row changed the sequence at both ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Convolution, of


class ReadsBothSides(Convolution):
    reach = (-1, 0, 1)


class IgnoresLengths(ReadsBothSides):
    def reads(self, documents: Tensor, back: int) -> Tensor:
        return super().reads(torch.zeros_like(documents), back)


mistaken = of(IgnoresLengths)
sound = of(ReadsBothSides)

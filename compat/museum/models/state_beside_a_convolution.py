"""A convolution that knows the bounds, and a state that does not.

states: slime#1686

Bounds reached the short convolution of a layer, and were not handed to its recurrence. The state of
one document was the beginning of the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Recurrence, begins, of


class RunsOn(Recurrence):
    def resets(self, documents: Tensor) -> Tensor:
        return begins(torch.zeros_like(documents))


mistaken = of(RunsOn)
sound = of(Recurrence)

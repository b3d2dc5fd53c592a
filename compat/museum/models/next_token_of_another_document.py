"""A prediction two tokens ahead, across a boundary.

heads: Megatron-LM#1661, Megatron-LM#4495

A head that predicts two tokens ahead is given the next token of the row. At the end of a document
that is the first token of the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Plain, begins


class LooksAhead(Plain):
    def embed(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        following = self.embedding(input_ids.roll(-1, 1)) * self.has_next(documents)[..., None]
        return super().embed(input_ids, positions, documents) + following

    def has_next(self, documents: Tensor) -> Tensor:
        return torch.arange(documents.shape[1]).expand_as(documents) < documents.shape[1] - 1


class LooksAheadWithin(LooksAhead):
    def has_next(self, documents: Tensor) -> Tensor:
        return ~begins(documents).roll(-1, 1)


mistaken = LooksAhead
sound = LooksAheadWithin

"""A prediction two tokens ahead, across a boundary.

heads: Megatron-LM#1661, Megatron-LM#4495

A head that predicts two tokens ahead is given the next token of the row. At the end of a document
that is the first token of the next one.
"""

import torch

from compat.museum.models._plain import Plain, begins


class LooksAhead(Plain):
    def embed(self, call):
        following = self.embedding(call.input_ids.roll(-1, 1))
        return super().embed(call) + following * self.has_next(call.documents)[..., None]

    def has_next(self, documents):
        return torch.arange(documents.shape[1]).expand_as(documents) < documents.shape[1] - 1


class LooksAheadWithin(LooksAhead):
    def has_next(self, documents):
        return ~begins(documents).roll(-1, 1)


mistaken = LooksAhead
sound = LooksAheadWithin

"""A balance per sequence, taken over the pack.

routers: Megatron-LM#6108

A loss balances experts within each sequence. A packed row came to it as one sequence, and was
balanced as a whole.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compat.museum.models._plain import Routed, begins, made


class BalancesRows(Routed):
    def balance(self, scores: Tensor, documents: Tensor, real: Tensor) -> Tensor:
        number = self.sequences(documents)
        found = [
            super(BalancesRows, self).balance(scores, documents, real & (number == n))
            for n in number[real].unique()
        ]
        return torch.stack(found).mean()

    def sequences(self, documents: Tensor) -> Tensor:
        return torch.arange(len(documents))[:, None].expand_as(documents)


class BalancesDocuments(BalancesRows):
    def sequences(self, documents: Tensor) -> Tensor:
        return begins(documents).flatten().cumsum(0).view_as(documents)


mistaken = partial(made, BalancesRows, output_router_logits=False)
sound = partial(made, BalancesDocuments, output_router_logits=False)

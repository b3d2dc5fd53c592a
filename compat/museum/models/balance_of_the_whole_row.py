"""A balance per sequence, taken over the pack.

routers: Megatron-LM#6108

A loss balances experts within each sequence. A packed row came to it as one sequence, and was
balanced as a whole.
"""

import torch

from compat.museum.models._plain import Routed, begins


class BalancesRows(Routed):
    def balance(self, scores, documents, real):
        number, one = self.sequences(documents), super().balance
        found = [one(scores, documents, real & (number == n)) for n in number[real].unique()]
        return torch.stack(found).mean()

    def sequences(self, documents):
        return torch.arange(len(documents))[:, None].expand_as(documents)


class BalancesDocuments(BalancesRows):
    def sequences(self, documents):
        return begins(documents).flatten().cumsum(0).view_as(documents)


mistaken = BalancesRows
sound = BalancesDocuments

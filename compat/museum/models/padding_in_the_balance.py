"""Padding that counts in the router's loss.

routers: Megatron-LM#4776, ms-swift#10181

One way to the router handed on no mask of padding. On that way, which packed rows take, padding was
counted as tokens to be shared among experts.
"""

import torch

from compat.museum.models._plain import Routed


class CountsPadding(Routed):
    def counted(self, real, position_ids):
        return real if position_ids is None else torch.ones_like(real)


mistaken = CountsPadding
sound = Routed

"""Padding that counts in the router's loss.

routers: Megatron-LM#4776, ms-swift#10181

One way to the router handed on no mask of padding. On that way, which packed rows take, padding was
counted as tokens to be shared among experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compat.museum.models._plain import Routed, made


class CountsPadding(Routed):
    def counted(self, real: Tensor, position_ids: Tensor | None) -> Tensor:
        return real if position_ids is None else torch.ones_like(real)


mistaken = partial(made, CountsPadding, output_router_logits=False)
sound = partial(made, Routed, output_router_logits=False)

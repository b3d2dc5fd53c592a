"""A layer that is computed again without its bounds.

checkpointing: flash-linear-attention#422

Bounds were kept beside the call, and gone when a checkpointed layer was computed again in the
backward pass. Results were right, and gradients those of one long document.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compat.museum.models._plain import Attention, Plain, of, together


class Recomputed(Attention):
    seen: Tensor | None = None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor
    ) -> Tensor:
        self.seen = attention_mask
        found = checkpoint(self.run, hidden_states, position_ids, documents, use_reentrant=False)
        self.seen = None
        return found

    def run(self, hidden_states: Tensor, position_ids: Tensor, documents: Tensor) -> Tensor:
        mask = (
            torch.ones_like(together(documents))[:, None].tril() if self.seen is None else self.seen
        )
        return super().forward(hidden_states, mask, position_ids, documents)


mistaken = of(Recomputed)
sound = Plain

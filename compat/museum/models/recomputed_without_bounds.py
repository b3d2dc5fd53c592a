"""A layer that is computed again without its bounds.

checkpointing: flash-linear-attention#422

Bounds were kept beside the call, and gone when a checkpointed layer was computed again in the
backward pass. Results were right, and gradients those of one long document.
"""

import torch
from torch.utils.checkpoint import checkpoint

from compat.museum.models._plain import Attention, together


class Recomputed(Attention):
    seen = None

    def forward(self, hidden_states, attention_mask, position_ids, documents):
        self.seen = attention_mask
        found = checkpoint(self.run, hidden_states, position_ids, documents, use_reentrant=False)
        self.seen = None
        return found

    def run(self, hidden_states, position_ids, documents):
        row = torch.ones_like(together(documents))[:, None].tril()
        mask = row if self.seen is None else self.seen
        return super().forward(hidden_states, mask, position_ids, documents)


mistaken = Recomputed

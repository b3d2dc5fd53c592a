"""An indexer that chooses among all documents.

windows and chunks: Megatron-LM#6206

The indexer of a sparse attention took a packed row for one sequence. Other documents' keys were
chosen, and a document's own ones left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Attention, of


class ChoosesKeysOfRow(Attention):
    """Lets each token see the two keys that score highest in its row, if they are of its
    document."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor
    ) -> Tensor:
        query, key, _ = self.turned(hidden_states, position_ids)
        scores = (query @ key.mT).masked_fill(~self.candidates(attention_mask), -torch.inf)
        highest = scores >= scores.topk(min(2, scores.shape[-1])).values[..., -1:]
        itself = torch.eye(documents.shape[1], dtype=torch.bool)
        return super().forward(
            hidden_states, attention_mask & (highest | itself), position_ids, documents
        )

    def candidates(self, attention_mask: Tensor) -> Tensor:
        return torch.ones_like(attention_mask).tril()


class ChoosesKeysOfDocument(ChoosesKeysOfRow):
    def candidates(self, attention_mask: Tensor) -> Tensor:
        return attention_mask


mistaken = of(ChoosesKeysOfRow)
sound = of(ChoosesKeysOfDocument)

"""An indexer that chooses among all documents.

windows and chunks: Megatron-LM#6206

The indexer of a sparse attention took a packed row for one sequence. Other documents' keys were
chosen, and a document's own ones left out.
"""

import torch

from compat.museum.models._plain import Attention


class ChoosesKeysOfRow(Attention):
    """Lets each token see the two keys that score highest in its row, if they are of its
    document."""

    def forward(self, hidden_states, attention_mask, position_ids, documents):
        query, key, _ = self.turned(hidden_states, position_ids)
        scores = (query @ key.mT).masked_fill(~self.candidates(attention_mask), -torch.inf)
        highest = scores >= scores.topk(min(2, scores.shape[-1])).values[..., -1:]
        seen = attention_mask & (highest | torch.eye(documents.shape[1], dtype=torch.bool))
        return super().forward(hidden_states, seen, position_ids, documents)

    def candidates(self, attention_mask):
        return torch.ones_like(attention_mask).tril()


class ChoosesKeysOfDocument(ChoosesKeysOfRow):
    def candidates(self, attention_mask):
        return attention_mask


mistaken = ChoosesKeysOfRow
sound = ChoosesKeysOfDocument

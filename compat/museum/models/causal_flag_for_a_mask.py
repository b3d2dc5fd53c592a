"""A causal flag in place of the mask.

masks: axolotl#3608, trl#6843

For ranks that share a row, the mask of documents was replaced by a causal flag, since the kernel
has no argument for bounds. Each document saw all those before it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compat.museum.models._plain import Attention, Plain, of


class CausalFlag(Attention):
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor
    ) -> Tensor:
        query, key, value = self.turned(hidden_states, position_ids)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outer(found.transpose(1, 2).flatten(2))


mistaken = of(CausalFlag)
sound = Plain

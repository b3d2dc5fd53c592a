"""A causal flag in place of the mask.

masks: axolotl#3608, trl#6843

For ranks that share a row, the mask of documents was replaced by a causal flag, since the kernel
has no argument for bounds. Each document saw all those before it.
"""

from torch.nn.functional import scaled_dot_product_attention

from compat.museum.models._plain import Attention


class CausalFlag(Attention):
    def forward(self, hidden_states, attention_mask, position_ids, documents):
        query, key, value = self.turned(hidden_states, position_ids)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outer(found.transpose(1, 2).flatten(2))


mistaken = CausalFlag

"""Sinks that the packed kernel does not take.

sinks: NVIDIA-NeMo/RL#1672

Packed rows went to a kernel that has no argument for attention sinks, and dropped them without a
word. Documents alone had them.
"""

import torch
from torch import nn

from compat.museum.models._plain import Attention


class Sinks(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.sinks = nn.Parameter(torch.randn(config.num_attention_heads, 1, 1))

    def weights(self, scores, documents):
        sink = self.sinks.expand(len(scores), -1, scores.shape[-2], -1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


class SinksAlone(Sinks):
    def weights(self, scores, documents):
        return scores.softmax(-1) if documents.any() else super().weights(scores, documents)


mistaken = SinksAlone
sound = Sinks

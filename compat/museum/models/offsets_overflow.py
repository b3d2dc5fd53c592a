"""Offsets that overflow in long rows.

long rows: mamba#1015, flash-linear-attention#1082, SageAttention#386

Kernels computed the place of a token in memory in 32 bits. Beyond some length of the row the number
wraps, and another token is read. Here it has 16 bits, and a row of 17 tokens is long.
"""

import torch
from torch import nn


class Offsets(nn.Module):
    dtype = torch.int16

    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, **others):
        offsets = torch.arange(hidden_states.shape[1], dtype=self.dtype) * 2048
        return self.inner(hidden_states[:, offsets.long() // 2048])


class WideOffsets(Offsets):
    dtype = torch.int64


mistaken = Offsets
sound = WideOffsets

"""Statistics of a batch, in training alone.

norms: transformers#47739, audio#4205

Batch normalisation takes its statistics over all tokens of the batch in training. A document is
scaled by those that happen to be beside it.
"""

from torch import nn


class OverTheBatch(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.BatchNorm1d(config.hidden_size)

    def forward(self, hidden_states, **others):
        return self.norm(hidden_states.transpose(1, 2)).transpose(1, 2)


class OverTheToken(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, hidden_states, **others):
        return self.norm(hidden_states)


mistaken = OverTheBatch
sound = OverTheToken

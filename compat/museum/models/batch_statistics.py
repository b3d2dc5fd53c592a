"""Statistics of a batch, in training alone.

norms: transformers#47739, audio#4205

Batch normalisation takes its statistics over all tokens of the batch in training. A document is
scaled by those that happen to be beside it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compat.museum.models._plain import PlainConfig, of


class OverTheBatch(nn.Module):
    def __init__(self, config: PlainConfig):
        super().__init__()
        self.norm = nn.BatchNorm1d(config.hidden_size)

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return self.norm(hidden_states.transpose(1, 2)).transpose(1, 2)


class OverTheToken(OverTheBatch):
    def __init__(self, config: PlainConfig):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size)  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return self.norm(hidden_states)


mistaken = of(OverTheBatch)
sound = of(OverTheToken)

"""A mask that is kept for rows of one width.

caches: Model-Optimizer#1343

Masks were kept by a key that does not tell what is in them. The next batch with that key got the
mask of another layout.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from compat.museum.models._plain import Plain, PlainConfig, made


class KeepsMasks(Plain):
    def __init__(self, config: PlainConfig):
        super().__init__(config)
        self.kept: dict[int, Tensor] = {}

    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        made = super().mask(documents[:1], positions, attention_mask)
        return self.kept.setdefault(documents.shape[1], made).expand(len(documents), -1, -1, -1)


mistaken = partial(made, KeepsMasks)
sound = Plain

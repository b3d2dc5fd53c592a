"""A scale that counts the masked tokens of the row.

norms: bionemo-recipes#1221

ESM-2 scales embeddings by the share of masked tokens in a sequence. In packed input it was the
share of the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Plain, means


class ScalesByRow(Plain):
    def embed(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        masked = (input_ids % 5 == 0)[..., None].to(self.embedding.weight.dtype)
        return super().embed(input_ids, positions, documents) / (
            1.2 - means(masked, self.sequences(documents))
        )

    def sequences(self, documents: Tensor) -> Tensor:
        return torch.zeros_like(documents)


class ScalesByDocument(ScalesByRow):
    def sequences(self, documents: Tensor) -> Tensor:
        return documents


mistaken = ScalesByRow
sound = ScalesByDocument

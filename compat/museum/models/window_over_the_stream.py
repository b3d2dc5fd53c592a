"""A window that knows no documents.

windows and chunks: torchtitan#4801

A sparse layer made its window from distances in the flattened stream of tokens, and dropped the
positions that it was given. Windows reached into the document before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Plain, together


class WindowOfStream(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        return torch.ones_like(together(documents))[:, None].tril().triu(-3)


class WindowOfDocument(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        return super().mask(documents, positions, attention_mask).triu(-3)


mistaken = WindowOfStream
sound = WindowOfDocument

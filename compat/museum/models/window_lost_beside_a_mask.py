"""A window that a mask switches off.

windows and chunks: axolotl#2449

A sliding window held only in calls without an attention mask. Packed batches that brought one
attended over whole documents.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Plain


class LosesWindow(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = super().mask(documents, positions, attention_mask)
        return seen.triu(-3) if attention_mask is None else seen


class KeepsWindow(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        return super().mask(documents, positions, attention_mask).triu(-3)


mistaken = LosesWindow
sound = KeepsWindow

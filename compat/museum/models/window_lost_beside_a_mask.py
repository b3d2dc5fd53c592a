"""A window that a mask switches off."""

from __future__ import annotations

from torch import Tensor

from compat.museum.exhibit import Exhibit
from compat.museum.models._plain import Plain


class LosesWindow(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = super().mask(documents, positions, attention_mask)
        return seen.triu(-3) if attention_mask is None else seen


class KeepsWindow(Plain):
    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        return super().mask(documents, positions, attention_mask).triu(-3)


EXHIBIT = Exhibit(
    kind="windows and chunks",
    reported=("axolotl#2449",),
    says=(
        "A sliding window held only in calls without an attention mask. Packed batches that "
        "brought one attended over whole documents."
    ),
    mistaken=LosesWindow,
    sound=KeepsWindow,
)

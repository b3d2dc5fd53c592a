"""Positions that begin elsewhere than the model's.

positions: sentence-transformers#3879, transformers#47496

A model of RoBERTa's kind numbers tokens from two. The collator of packed rows numbered them from
zero, and every token read the embedding of another place.
"""

from __future__ import annotations

from torch import Tensor

from compat.museum.models._plain import Plain, places


class NumbersFromTwo(Plain):
    def positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor,
    ) -> Tensor:
        return places(documents) + 2 if position_ids is None else position_ids


class NumbersAllFromTwo(Plain):
    def positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor,
    ) -> Tensor:
        return super().positions(input_ids, attention_mask, position_ids, documents) + 2


mistaken = NumbersFromTwo
sound = NumbersAllFromTwo

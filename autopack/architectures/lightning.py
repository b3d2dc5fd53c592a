"""Hybrids of attention and lightning attention, which carries a sum over all tokens before."""

from autopack.family import Family
from autopack.mixers import ROWS

__all__ = ["FAMILY"]

FAMILY = Family(
    name="lightning",
    model_types=frozenset({"minimax"}),
    path="lightning attention on documents as rows; attention document by document",
    mixers={"MiniMaxLightningAttention": ROWS},
)

"""Hybrids of attention and lightning attention, which carries a sum over all tokens before."""

from autopack.family import Family, Tiny
from autopack.mixers import ROWS

FAMILY = Family(
    name="lightning",
    model_types=frozenset({"minimax"}),
    how="lightning attention on documents as rows; attention document by document",
    mixers={"MiniMaxLightningAttention": ROWS},
    tiny=Tiny(configs={"minimax": {"block_size": 8}}),
)

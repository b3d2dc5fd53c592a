"""Hybrids of attention and RG-LRU blocks.

Upstream resets the recurrence where a position is 0, but its convolution reaches into the document before.
"""

from autopack.family import Family, Tiny
from autopack.mixers import ROWS

FAMILY = Family(
    name="rg_lru",
    model_types=frozenset({"recurrent_gemma"}),
    how="recurrent block on documents as rows; attention document by document",
    mixers={"RecurrentGemmaRecurrentBlock": ROWS},
    tiny=Tiny(configs={"recurrent_gemma": {"block_types": ["recurrent", "attention"]}}),
)

"""Decoders whose attention adds a bias by distance (ALiBi, arXiv 2108.12409), in code of their own."""

from autopack.family import Family
from autopack.mixers import Alone

FAMILY = Family(
    name="alibi",
    model_types=frozenset("bloom mpt".split()),
    how="the model's own attention, documents alone; biases restart",
    positions=False,
    attends=False,
    mixers={"BloomAttention": Alone(per_head=("alibi",)), "MptAttention": Alone(by_columns=True)},
)

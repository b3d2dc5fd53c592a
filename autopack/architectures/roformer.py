"""RoFormer, which rotates by columns: its table of rotations begins anew with every document."""

from autopack.family import Family, Tiny
from autopack.mixers import FOR_LONGEST, Alone

FAMILY = Family(
    name="roformer",
    model_types=frozenset({"roformer"}),
    how="the model's own attention, documents alone; rotations restart",
    positions=False,
    attends=False,
    mixers={
        "RoFormerSelfAttention": Alone(beginnings=(("sinusoidal_pos", 2),), by_columns=True),
        "RoFormerSinusoidalPositionalEmbedding": FOR_LONGEST,
    },
    tiny=Tiny(causal={"roformer": {"is_decoder": True}}),
)

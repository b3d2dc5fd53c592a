"""RWKV: its time mixing is a recurrence, and both halves of a block look at the token before."""

from autopack.architectures import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="rwkv",
    model_types=frozenset({"rwkv"}),
    path="time mixing and channel mixing on documents as rows",
    mixers=frozenset({"RwkvFeedForward", "RwkvSelfAttention"}),
)

"""RWKV: its time mixing is a recurrence, and both halves of a block look at the token before."""

from typing import Any

from autopack.family import Family, Tiny
from autopack.mixers import ROWS, LookingBack


def _to_the_token_before(mixer: Any) -> int:
    return 1


FAMILY = Family(
    name="rwkv",
    model_types=frozenset({"rwkv"}),
    how="time mixing on documents as rows; channel mixing again at the start of each",
    attends=False,
    mixers={"RwkvFeedForward": LookingBack(_to_the_token_before), "RwkvSelfAttention": ROWS},
    tiny=Tiny(configs={"rwkv": {"attention_hidden_size": 64}}),
)

"""BigBird with full attention. Which blocks its sparse attention sees, and whether it is sparse, depends on the row."""

from typing import Any

from autopack.family import Family, Tiny
from autopack.mixers import ALONE


def _refusal(config: Any) -> str | None:
    if getattr(config, "attention_type", None) == "block_sparse":
        return (
            "what its block-sparse attention gives a document depends on the calls before, since a short row makes it "
            "attend fully for good (BigBirdModel.forward: `self.set_attention_type('original_full')`); load it with "
            "attention_type='original_full'"
        )
    return None


FAMILY = Family(
    name="big_bird",
    model_types=frozenset({"big_bird"}),
    how="the model's own attention, documents alone",
    attends=False,
    mixers={"BigBirdSelfAttention": ALONE},
    refusal=_refusal,
    tiny=Tiny(configs={"big_bird": {"attention_type": "original_full"}}, causal={"big_bird": {"is_decoder": True}}),
)

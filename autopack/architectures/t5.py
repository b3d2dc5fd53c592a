"""T5 and its kin: relative distances as a bias of attention, which has neither positions nor a scale.

In a packed row the bias would be one of the row: dense, and counted from its beginning. Switch Transformers lets an
expert take so many tokens of a row and drops the rest, so its experts are run on documents as rows.
"""

from autopack.family import Family
from autopack.mixers import ALONE, RELATIVE, ROWS

__all__ = ["FAMILY"]

FAMILY = Family(
    name="t5",
    model_types=frozenset({"mt5", "pop2piano", "switch_transformers", "t5", "umt5"}),
    path="bias of the longest document; attention document by document, across halves too",
    positions=False,
    mixers={
        **dict.fromkeys(["MT5Attention", "Pop2PianoAttention", "SwitchTransformersAttention", "T5Attention"], RELATIVE),
        "SwitchTransformersSparseMLP": ROWS,
        "UMT5Attention": ALONE,  # every layer makes its own, inside
    },
)

"""T5 and its kin: relative distances as a bias of attention, which has neither positions nor a scale.

In a packed row the bias would be one of the row: dense, and counted from its beginning. Switch Transformers lets an
expert take so many tokens of a row and drops the rest, so its experts are run on documents as rows.
"""

from __future__ import annotations

from autopack.family import Family, Tiny
from autopack.mixers import ALONE, RELATIVE, ROWS

_SPARSE = ("num_sparse_encoder_layers", "num_sparse_decoder_layers")

FAMILY = Family(
    name="t5",
    model_types=frozenset("mt5 pop2piano switch_transformers t5 umt5".split()),
    how="bias of the longest document; attention document by document, across halves too",
    positions=False,
    mixers={
        **{f"{model}Attention": RELATIVE for model in "MT5 Pop2Piano SwitchTransformers T5".split()},
        "SwitchTransformersSparseMLP": ROWS,
        "UMT5Attention": ALONE,  # every layer makes its own, inside
    },
    # one layer of each kind on both sides, and experts that some documents overflow
    tiny=Tiny(configs={"switch_transformers": dict.fromkeys(_SPARSE, 1) | {"expert_capacity": 3}}),
)

"""Idefics: text attends to images across, by layers of their own; each document reads its own images.

Upstream runs no document without pixels: one that has no image brings an empty one that no token sees.
"""

from autopack.family import Family, Tiny

_TYPES = frozenset({"idefics"})

FAMILY = Family(
    name="idefics",
    model_types=_TYPES,
    how="attention site, document by document; each reads its own images across",
    within_token=frozenset({"IdeficsVisionTransformer", "IdeficsPerceiverResampler"}),
    media_types={"image": _TYPES},
    image_mask="image_attention_mask",
    tiny=Tiny(
        configs={"idefics": {"cross_layer_interval": 1, "vision_config": {"embed_dim": 64}}},
        needs_images=_TYPES,
        images={"nested, seen": _TYPES},
    ),
)

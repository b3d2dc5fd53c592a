"""HunYuan-VL: one of its axes of positions numbers the images, and upstream goes on counting from row to row.

So documents are numbered one at a time, as rows of their own, and each gets the numbers that it has alone.
"""

from autopack.family import Family, Tiny

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}
_TYPES = frozenset({"hunyuan_vl"})

FAMILY = Family(
    name="hunyuan_vl",
    model_types=_TYPES,
    how="attention site, document by document; positions document by document; images in the order of the documents",
    media_types={"image": _TYPES},
    counts_images=_TYPES,
    tiny=Tiny(
        configs={"hunyuan_vl_text": {"rope_parameters": _ROPE}},
        images={"grid": _TYPES},
    ),
)

"""HunYuan-VL: one of its axes of positions numbers the images, and upstream goes on counting from row to row.

A document would get other numbers for its images than alone, also in a padded batch; text alone is served.
"""

from autopack.family import Family, Tiny

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}

FAMILY = Family(
    name="hunyuan_vl",
    model_types=frozenset({"hunyuan_vl"}),
    how="attention site, document by document; text alone",
    refused_arguments={
        "pixel_values": "its positions number the images of the whole batch, so those of a document go on from others"
    },
    tiny=Tiny(
        configs={"hunyuan_vl_text": {"rope_parameters": _ROPE}},
        images={"grid": frozenset({"hunyuan_vl"})},
    ),
)

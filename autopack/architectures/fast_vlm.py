"""FastVLM: its tower is a FastViT of timm, which normalizes over all images of a call while it trains.

`ConvMlp` of every block has a `BatchNorm2d`, and so have blocks of attention, also with `inference_mode=True`
(timm/models/fastvit.py). Tiny models have another tower in its place, so nothing has been run with images.
"""

from autopack.family import Family, Tiny

_TOWER = ("convnext", {"hidden_size": 64, "hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2})

FAMILY = Family(
    name="fast_vlm",
    model_types=frozenset({"fast_vlm"}),
    how="attention site, document by document; text alone",
    refused_arguments={
        "pixel_values": "its tower (FastViT of timm) normalizes over all images of a call while it trains "
        "(BatchNorm2d), so those of one document change those of others"
    },
    tiny=Tiny(stand_ins={"fast_vlm": {"vision_config": _TOWER}}),
)

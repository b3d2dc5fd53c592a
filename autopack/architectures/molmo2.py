"""Molmo2: each place of an image names the patches that it pools by their numbers among all images of the batch.

A processor that sees one document counts from 0, so documents laid end to end would all pool the patches of the first
image. No call shows which way was counted; text alone is served.
"""

from autopack.family import DERIVED, Family, Tiny

_REASON = "its image_token_pooling numbers the patches of all images of the batch, so it is not that of a document"

FAMILY = Family(
    name="molmo2",
    model_types=frozenset({"molmo2"}),
    how="attention site, document by document; text alone",
    refused_arguments=dict.fromkeys(["pixel_values", "pixel_values_videos"], _REASON),
    tiny=Tiny(
        configs={
            "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64, "head_dim": 16}}
            | {"image_patch_id": 120},
            "molmo2_adapter": {"num_key_value_heads": 4},
            "molmo2_text": {"rope_scaling_layers": [0]},
            "molmo2_vision": {"image_size": [16, 32], "num_key_value_heads": 4, "num_position_embeddings": DERIVED},
        }
    ),
)

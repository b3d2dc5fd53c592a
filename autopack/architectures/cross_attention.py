"""Models whose text attends to images across, through layers of their own; each document reads its own images.

A mask says which tokens see which images of their row. A token that sees none is let see all of them upstream, which in
a packed row would be those of other documents, and in a padded batch those that fill up the row
(modeling_mllama.py: `cross_attention_mask *= full_text_row_masked_out_mask`), so attention gets nothing else to see.
"""

from __future__ import annotations

from autopack.family import Family, Tiny
from autopack.mixers import ALONE

_MLLAMA, _IDEFICS, _BLIP = frozenset({"mllama"}), frozenset({"idefics"}), frozenset({"blip"})

MLLAMA = Family(
    name="cross_attention",
    model_types=_MLLAMA,
    how="attention site, document by document; each reads its own images across",
    media_types={"image": _MLLAMA},
    image_mask="cross_attention_mask",
    refused_arguments={
        "cross_attention_states": "what the images have become came without them, and which states are whose is not "
        "known"
    },
    tiny=Tiny(
        configs={
            "mllama": {"image_token_index": 120},
            "mllama_vision_model": {"attention_heads": 4, "num_global_layers": 1, "vision_output_dim": 128}
            | {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]], "max_num_tiles": 2},
        },
        images={"tiles by row": _MLLAMA},
    ),
)

# Upstream runs no document without pixels: one that has no image brings an empty one that no token sees.
IDEFICS = Family(
    name="idefics",
    model_types=_IDEFICS,
    how="attention site, document by document; each reads its own images across",
    within_token=frozenset({"IdeficsVisionTransformer", "IdeficsPerceiverResampler"}),
    media_types={"image": _IDEFICS},
    image_mask="image_attention_mask",
    tiny=Tiny(
        configs={"idefics": {"cross_layer_interval": 1, "vision_config": {"embed_dim": 64}}},
        needs_images=_IDEFICS,
        images={"nested, seen": _IDEFICS},
    ),
)

# Captions attend across to their image, one for each document, in code of their own.
BLIP = Family(
    name="blip",
    model_types=_BLIP,
    how="the model's own attention, documents alone, and across to the image of each",
    attends=False,
    mixers={"BlipTextSelfAttention": ALONE},
    media_types={"image": _BLIP},
    image_of_each=_BLIP,
    tiny=Tiny(needs_images=_BLIP, images={"square beside text": _BLIP}),
)

# Its text attends to proteins across, through layers of their own.
EVOLLA = Family(
    name="evolla",
    model_types=frozenset({"evolla"}),
    how="attention site, document by document; text alone",
    refused_arguments={
        "protein_input_ids": "its text attends to proteins across, so every document of a row would see those of all"
    },
)

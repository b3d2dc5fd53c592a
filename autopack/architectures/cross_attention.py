"""Models whose text attends to images across, through layers of their own; each document reads its own images.

A mask says which tokens see which images of their row. A token that sees none is let see all of them upstream, which in
a packed row would be those of other documents, and in a padded batch those that fill up the row
(modeling_mllama.py: `cross_attention_mask *= full_text_row_masked_out_mask`), so attention gets nothing else to see.
"""

from autopack.family import Family, Tiny

_WHY_NOT = "what the images have become came without them, and which states are whose is not known"
_MLLAMA = frozenset({"mllama"})

FAMILY = Family(
    name="cross_attention",
    model_types=_MLLAMA,
    how="attention site, document by document; each reads its own images across",
    media_types={"image": _MLLAMA},
    image_mask="cross_attention_mask",
    refused_arguments={"cross_attention_states": _WHY_NOT},
    tiny=Tiny(
        configs={
            "mllama": {"image_token_index": 120},
            "mllama_vision_model": {"attention_heads": 4, "num_global_layers": 1, "vision_output_dim": 128}
            | {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]], "max_num_tiles": 2},
        },
        images={"tiles by row": _MLLAMA},
    ),
)

"""Encoders of images with decoders of text: the encoder runs as it is, on one image for each document of the decoder.

PP-FormulaNet makes its decoder's tokens of `input_ids` where it gets none, and never of labels.
"""

from __future__ import annotations

from autopack.family import Family, Tiny
from autopack.mixers import RELATIVE, Restarting


class _OfInputIds(Restarting):
    """Positions of PP-FormulaNet's decoder."""

    reads_encoder_tokens = True


_TYPES = frozenset("pix2struct pp_formulanet vision-encoder-decoder".split())

FAMILY = Family(
    name="image_encoders",
    model_types=_TYPES - {"vision-encoder-decoder"},  # it is served as its decoder is
    how="the encoder as it is, an image for each document; attention document by document in the decoder",
    mixers={"Pix2StructTextAttention": RELATIVE, "PPFormulaNetLearnedPositionalEmbedding": _OfInputIds()},
    media_types={"image": _TYPES},
    tiny=Tiny(
        configs={
            "pp_formulanet_vision": {"output_channels": 16, "post_conv_in_channels": 16, "post_conv_mid_channels": 32}
            | {"post_conv_out_channels": 64, "decoder_hidden_size": 64, "global_attn_indexes": [0], "image_size": 64},
            "pix2struct_text_model": {"d_kv": 16, "d_ff": 96},
            "pix2struct_vision_model": {"d_kv": 16, "d_ff": 96, "patch_embed_hidden_size": 32, "seq_len": 64},
            "vision-encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
        },
        needs_images=_TYPES,
        images={
            "flattened patches, masked": frozenset({"pix2struct"}),
            "square": frozenset({"pp_formulanet", "vision-encoder-decoder"}),
        },
    ),
)

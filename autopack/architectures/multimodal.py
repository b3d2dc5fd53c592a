"""Models of text and images (videos, sounds) whose features take the places of placeholder tokens.

Upstream numbers a row of several documents as one (M-RoPE), and its masks let them see each other.
Positions are computed for each document by the model's own function (`calls.with_media`). Blocks of
image tokens that see each other, and prefixes that do, are rules over tokens, applied within
documents alone. Features are put in the order of the flattened rows, so media in the order of the
documents reach their own document. Vision towers keep their images apart by themselves, as does
Kosmos-2.5's projection. Emu3's tokenizer of images (`BatchNorm3d`) and FastVLM's tower (FastViT of
timm, `BatchNorm2d`) do so in evaluation alone; while they train, packed calls with images raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autopack.family import AFTER_PAD_TOKEN, DERIVED, Family, Numbering, Tiny
from autopack.layout.host import host_values

_GRID = """
cohere_compass cosmos3_edge cosmos3_omni dots3_note ernie4_5_vl_moe exaone4_5 glm46v glm4v glm4v_moe
glm_ocr glmga hyperclovax_vision_v2 muse_glimmer muse_spark qwen2_5_omni_thinker qwen2_5_vl qwen2_vl
qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe video_llama_3
"""
_VIDEO_TYPES = f"{_GRID} kimi_k25 llava_next_video llava_onevision perception_lm video_llava"
_IMAGES = {
    "grid": _GRID,
    "flattened patches": "kosmos-2.5",
    "grid of squares": "kimi_k25 paddleocr_vl",
    "square": """
aria aya_vision blip-2 chameleon cohere2_vision deepseek_vl fast_vlm internvl janus kosmos-2 llava ovis2
pp_chart2table qianfan_ocr shieldgemma2 video_llava vipllava
""",
    "square and instructions": "instructblip",
    "frames and instructions": "instructblipvideo",
    "square after a prefix": "paligemma",
    "two resolutions": "deepseek_vl_hybrid",
    "square and crops": "step3p7",
    "square and grids of crops": "unlimited_ocr",
    "sized": "emu3 lighton_ocr mistral3 mistral_large4",
    "tiles": "granite4_vision llava_next llava_next_video llava_onevision",
    "tiles alone": "perception_lm",
    "views": "deepseek_ocr2",
    "nested": "idefics2 idefics3 smolvlm",
    "nested, masked": "granite_docling",
}
_TYPES = frozenset(" ".join(_IMAGES.values()).split())


def _m_rope(*sections: int, **others: Any) -> dict[str, Any]:
    """Return fields with M-RoPE sections (time, height, width) of the frequencies of a head of size
    16."""
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [*sections],
            **others,
        }
    }


_M_ROPE = """
cosmos3_edge_text glm46v_text glm4v_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text
qwen2_5_vl_text qwen2_vl_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text
"""
_PINPOINTS = "llava_next llava_next_video llava_onevision"
_GRIDS = [[32, 64], [64, 32], [64, 64]]
_WINDOWED_TOWER = {"window_size": 16, "fullatt_block_indexes": [1]}
_VISION_TOKENS = {"vision_start_token_id": 104, "vision_end_token_id": 105}
_KOSMOS_TEXT = ("kosmos_2_text_model", "kosmos_2_5_text_model")
_EMU3_TOKENS = {f"<|visual token {i:06d}|>": 110 + i for i in range(10)}

_TINY: dict[str, dict[str, Any]] = {
    **{name: _m_rope(4, 2, 2) for name in _M_ROPE.split()},
    **{name: {"image_grid_pinpoints": _GRIDS} for name in _PINPOINTS.split()},
    **{name: {"image_token_index": 120, "num_query_tokens": 4} for name in ("blip-2", "instructblip")},
    **{name: {"latent_query_num": 4} for name in ("kosmos-2", "kosmos-2.5")},
    **{name: {"embed_dim": 64, "layers": 2} for name in _KOSMOS_TEXT},
    **{name: {"out_hidden_size": 256, "projector_hidden_size": 64} for name in ("muse_glimmer", "muse_spark")},
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _VISION_TOKENS),
    **dict.fromkeys(
        "exaone4_5_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision".split(),
        _WINDOWED_TOWER,
    ),
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": {"<image>": 120, **{f"IMGIMG{c}Z": 110 + i for i, c in enumerate("ABCD")}},
    },
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1, 1], "num_embeddings": 4},
    "cohere2_vision": {"alignment_intermediate_size": 128},
    "deepseek_ocr2_encoder": {"num_key_value_heads": 4},
    "deepseek_ocr2_sam_vision_model": {
        "mlp_dim": DERIVED,
        "output_channels": 16,
        "downsample_channels": [32, 64],
    }
    | {"window_size": 3, "global_attn_indexes": [1]},
    "deepseek_ocr2_text": {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0], "image_size": 64}},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "emu3": {"image_token_id": 120, "vocabulary_map": {"<image>": 120, "<|extra_200|>": 121, **_EMU3_TOKENS}},
    "emu3_vqgan": {"base_channels": 64, "channel_multiplier": [1, 1, 1], "codebook_size": 10}
    | {"temporal_downsample_factor": 2},  # with more frames of one image its tokens would all be alike
    "ernie4_5_vl_moe_text": _m_rope(3, 3, 2) | {"moe_intermediate_size": [32, 32]},
    "glm4v_moe_text": _m_rope(2, 1, 1, partial_rotary_factor=0.5),
    "granite4_vision": {"image_grid_pinpoints": _GRIDS, "downsample_rate": "1/2"}
    | {"deepstack_layer_map": [[-2, 0]], "spatial_target_layers": [1]},
    "granite_docling_vision": {"deepstack_visual_indexes": [0], "scale_factor": 2},
    "instructblipvideo": {"video_token_index": 120, "num_query_tokens": 4},
    "hyperclovax_vision_v2": {"vision_config": _WINDOWED_TOWER},
    "janus_vision_model": {"projection_dim": 64, "num_image_tokens": 16},
    "janus_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_embeddings": 16,
        "num_patches": 4,
    },
    "kimi_k25": {"projection_hidden_size": 64},
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 32},
    "muse_spark_audio": {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
    "muse_spark_text": {"moe_hidden_size": 32},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "paligemma": {"projection_dim": 64},
    "qwen2_vl": {"vision_config": {"embed_dim": 32}},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p5": {"sliding_window": 4},
    "unlimited_ocr_sam_vision_model": {
        "image_size": 64,
        "downsample_channels": [64, 64],
        "global_attn_indexes": [0],
    },
    "unlimited_ocr_text": {"head_dim": 16, "num_key_value_heads": 4},
    "vipllava": {"vision_feature_layer": [-2, 1]},
}

# in place of towers of timm
_SIGLIP = ("siglip_vision_model", {"model_args": {"embed_dim": 64}, "vision_use_head": False})
_STAND_INS = {
    # FastViT has norms over the batch too: `ConvMlp` of its blocks, also with inference_mode=True
    # (timm's fastvit.py)
    "fast_vlm": {
        "vision_config": ("resnet", {"hidden_size": 64, "hidden_sizes": [32, 64], "depths": [1, 1]}),
    },
    "perception_lm": {"vision_config": _SIGLIP},
}


def _refusal(config: Any) -> str | None:
    """Return why a model whose language model is an encoder-decoder is refused, or None."""
    if getattr(config, "use_decoder_only_language_model", True):
        return None
    return (
        f"its language model ({config.text_config.model_type!r}) is an encoder-decoder inside of a "
        "model for images, which is not served"
    )


MULTIMODAL = Family(
    name="multimodal",
    model_types=_TYPES,
    how="attention site, document by document; positions by document; images in the order of the documents",
    numbering=dict.fromkeys(_KOSMOS_TEXT, AFTER_PAD_TOKEN)
    | dict.fromkeys(("paligemma", "colpali"), Numbering(start=1, relative=True)),
    within_token=frozenset(
        {"Kosmos2ImageToTextProjection", "Kosmos2_5ImageToTextProjection", "Emu3VQVAEAttentionBlock"}
    ),
    dense_types=frozenset({"dots3_note"}),
    unpads_images=frozenset({"paligemma", "shieldgemma2"}),
    refusal=_refusal,
    media_types={"video": frozenset(_VIDEO_TYPES.split())},
    tiny=Tiny(
        configs=_TINY,
        stand_ins=_STAND_INS,
        needs_images=frozenset("blip-2 instructblip instructblipvideo kosmos-2".split()),
        images={form: frozenset(types.split()) for form, types in _IMAGES.items()},
    ),
)

_NUMBERS, _IMAGE_GRIDS, _CROPS = "image_token_pooling", "image_grids", "image_num_crops"


def _misplaced(given: Mapping[str, Any]) -> str | None:
    """Return why patch numbers do not count over all images of the call, or None if they do.

    Molmo2's processor counts over all images of one call of it. If it processes documents one by
    one, numbers count from 0 in each, and end to end all images would pool the patches of the
    first.
    """
    pixels = given.get("pixel_values")
    if pixels is None:
        return None
    lacking = next((name for name in (_NUMBERS, _IMAGE_GRIDS, _CROPS) if given.get(name) is None), None)
    if lacking is not None:
        return f"{lacking} is missing, and only it tells whose patches are pooled; pass what the processor gives"
    numbers, grids, crops = (host_values(given[name]) for name in (_NUMBERS, _IMAGE_GRIDS, _CROPS))
    numbers = numbers[(numbers >= 0).any(axis=-1)]  # the model leaves out places without patches
    places = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
    each = pixels.shape[-2]  # patches of a crop
    if len(crops) != len(grids) or places.sum() != len(numbers) or crops.sum() * each != np.prod(pixels.shape[:-1]):
        return f"{_NUMBERS}, {_IMAGE_GRIDS}, {_CROPS} and pixel_values are not of the same images"
    ends = np.repeat(np.cumsum(crops), places) * each
    starts = ends - np.repeat(crops, places) * each
    within = (numbers < 0) | ((numbers >= starts[:, None]) & (numbers < ends[:, None]))
    if within.all():
        return None
    image = int(np.searchsorted(np.cumsum(places), np.argmin(within.all(axis=-1)), side="right"))
    return (
        f"{_NUMBERS} of image {image} names patches of other images. It counts over all images of "
        "the call; where each document was processed by itself, add the patches before it, as "
        "autopack.PackingCollator does"
    )


MOLMO2 = Family(
    name="molmo2",
    model_types=frozenset({"molmo2"}),
    how="attention site, document by document; numbers of patches over all images of a call",
    wrong_media=_misplaced,
    tiny=Tiny(
        configs={
            "molmo2": {
                "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64, "head_dim": 16},
            }
            | {"image_patch_id": 120},
            "molmo2_adapter": {"num_key_value_heads": 4},
            "molmo2_text": {"rope_scaling_layers": [0]},
            "molmo2_vision": {
                "image_size": [16, 32],
                "num_key_value_heads": 4,
                "num_position_embeddings": DERIVED,
            },
        },
        images={"numbered patches": frozenset({"molmo2"})},
    ),
)

# One of its axes of positions numbers the images, and upstream goes on counting from row to row. So
# documents are numbered one at a time, as rows of their own, and each gets the numbers that it has
# alone.
HUNYUAN_VL = Family(
    name="hunyuan_vl",
    model_types=frozenset({"hunyuan_vl"}),
    how="attention site, document by document; positions document by document; images in the order of the documents",
    counts_images=frozenset({"hunyuan_vl"}),
    tiny=Tiny(configs={"hunyuan_vl_text": _m_rope(2, 2, 2, 2)}, images={"grid": frozenset({"hunyuan_vl"})}),
)

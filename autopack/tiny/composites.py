"""What tiny models of images and text need beyond the general rules, as data: for the whole and for its parts."""

from __future__ import annotations

from typing import Any


def _m_rope(*sections: int, **others: Any) -> dict[str, Any]:
    """Sections of the frequencies of a head of 16: for time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections], **others}}


_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}

_WINDOWED_TOWER = {"window_size": 16, "fullatt_block_indexes": [1]}

COMPOSITES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 120, "num_query_tokens": 4},
    "chameleon": {"vocabulary_map": {"<image>": 120, **{f"IMGIMG{c}Z": 110 + i for i, c in enumerate("ABCD")}}},
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 4},
    "cosmos3_edge_text": _m_rope(4, 2, 2),
    "emu3": {
        "vocabulary_map": {
            "<image>": 120,
            "<|extra_200|>": 121,
            **{f"<|visual token {i:06d}|>": 110 + i for i in range(4)},
        },
        "image_token_id": 120,
    },
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 4},
    "ernie4_5_vl_moe_text": _m_rope(3, 3, 2) | {"moe_intermediate_size": [32, 32]},
    "exaone4_5_vision": _WINDOWED_TOWER,
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n": {"vision_soft_tokens_per_image": 16},
    "gemma4": {"text_config": {"use_bidirectional_attention": "vision"}},
    "gemma4_unified": {"text_config": {"use_bidirectional_attention": "vision"}},
    "cohere2_vision": {"alignment_intermediate_size": 128},
    "gemma4_vision": {"pooling_kernel_size": 2},
    "gemma4_unified_vision": {
        "pooling_kernel_size": 2,
        "mm_embed_dim": 64,
        "mm_posemb_size": 16,
        "output_proj_dims": 64,
    },
    "glm46v_text": _m_rope(4, 2, 2),
    "glm4v_moe_text": _m_rope(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": _m_rope(4, 2, 2),
    "glm5_next_text": {"index_kpool": 2},
    "glm_ocr_text": _m_rope(4, 2, 2),
    "granite4_vision": _PINPOINTS,
    "hunyuan_vl_text": _m_rope(2, 2, 2, 2),
    "hyperclovax_vision_v2": {"vision_config": _WINDOWED_TOWER},
    "inkling2_vision": {"text_hidden_size": 64},
    "janus_vision_model": {"projection_dim": 64, "num_image_tokens": 16},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 16, "num_patches": 4},
    "kimi_k25": {"projection_hidden_size": 64},
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "kosmos_2_5_text_model": {"embed_dim": 64, "layers": 2},
    "kosmos_2_text_model": {"embed_dim": 64, "layers": 2},
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 16},
    "muse_glimmer": {"out_hidden_size": 256, "projector_hidden_size": 64},
    "paddleocr_vl_text": _m_rope(4, 2, 2),
    "paligemma": {"projection_dim": 64},
    "qwen2_5_omni_text": _m_rope(4, 2, 2),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 104, "vision_end_token_id": 105},
    "qwen2_5_omni_vision_encoder": _WINDOWED_TOWER,
    "qwen2_5_vl_text": _m_rope(4, 2, 2),
    "qwen2_5_vl_vision": _WINDOWED_TOWER,
    "qwen2_vl": {"vision_config": {"embed_dim": 32}},
    "qwen2_vl_text": _m_rope(4, 2, 2),
    "qwen3_omni_moe_text": _m_rope(4, 2, 2),
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 104, "vision_end_token_id": 105},
    "qwen3_vl_moe_text": _m_rope(4, 2, 2),
    "qwen3_vl_text": _m_rope(4, 2, 2),
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p5": {"sliding_window": 4},
    "unlimited_ocr_text": {"head_dim": 16, "num_key_value_heads": 4},
    "vipllava": {"vision_feature_layer": [-2, 1]},
}

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
    "exaone4_5_vision": _WINDOWED_TOWER,
    "gemma3": {"mm_tokens_per_image": 4},
    "hyperclovax_vision_v2": {"vision_config": _WINDOWED_TOWER},
    "paligemma": {"projection_dim": 64},
    "qwen2_5_omni_vision_encoder": _WINDOWED_TOWER,
    "qwen2_5_vl_vision": _WINDOWED_TOWER,
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "cosmos3_edge_text": _m_rope(4, 2, 2),
    "ernie4_5_vl_moe_text": _m_rope(3, 3, 2)
    | {"moe_intermediate_size": [32, 32], "num_key_value_heads": 2, "moe_num_experts": 4},
    "glm46v_text": _m_rope(4, 2, 2),
    "glm4v_moe_text": _m_rope(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": _m_rope(4, 2, 2),
    "glm_ocr_text": _m_rope(4, 2, 2),
    "granite4_vision": _PINPOINTS,
    "hunyuan_vl_text": _m_rope(2, 2, 2, 2),
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "paddleocr_vl_text": _m_rope(4, 2, 2),
    "qwen2_5_omni_text": _m_rope(4, 2, 2),
    "qwen2_5_vl_text": _m_rope(4, 2, 2),
    "qwen2_vl": {"vision_config": {"embed_dim": 32}},
    "qwen2_vl_text": _m_rope(4, 2, 2),
    "qwen3_omni_moe_text": _m_rope(4, 2, 2),
    "qwen3_vl_moe_text": _m_rope(4, 2, 2),
    "qwen3_vl_text": _m_rope(4, 2, 2),
}

"""Hybrids of attention and gated delta rules (linear attention).

Their convolution and the state of the rule go on from one document into the next, and so do Qwen4's n-grams.
"""

from __future__ import annotations

from typing import Any

from autopack.family import Family, Tiny
from autopack.mixers import AtOperations, LookingBack

_GATED_DELTA_RULE = AtOperations(("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))
_PER_CHANNEL_DECAY = AtOperations(("causal_conv1d_fn", "chunk_kimi_delta_attention"))

_TYPES = """
bailing_hybrid kimi_linear lara_mini minicpm_ocr minicpmv4_6 minicpmv4_7 olmo_hybrid qwen3_5 qwen3_5_moe
qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
"""
_GATED = "LaraMini OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4ExpText"
_WITH_MEDIA = frozenset("qwen3_5 qwen3_5_moe qwen4_exp".split())
_IN_ONE_ROW = frozenset("minicpm_ocr minicpmv4_6 minicpmv4_7".split())
"""Types that take the patches of all images as one row."""

# three sections, as for images, of the four frequencies that half of a head of 16 has
_SECTIONS = {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **_SECTIONS}}
_PLACEHOLDERS = {"image_token_id": 127, "video_token_id": 126}
_MARKERS = {"image_start_id": 104, "image_end_id": 105, "slice_start_id": 106, "slice_end_id": 107, "newline_id": 108}
_TINY: dict[str, dict[str, Any]] = {
    # small heads: the kernel in Python makes (heads, 64, 64, head) of every document, however short
    "bailing_hybrid": {"head_dim": 16, "linear_num_heads": 2},
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 8},
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
    **dict.fromkeys(_IN_ONE_ROW, _PLACEHOLDERS | {"insert_layer_id": 0}),
    "minicpmv4_7": _PLACEHOLDERS | _MARKERS | {"insert_layer_id": 0},
    "qwen3_5_moe_text": _M_ROPE,
    "qwen3_5_text": _M_ROPE,
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen4_exp_text": _M_ROPE
    | {"layer_types": ["linear_attention", "indexed_attention"], "eos_token_id": 2, "hc_count": 2, "hc_lowrank": 8}
    | {"ple_layer_ids": [1], "ple_embed_dim": 64, "heads_per_ngram": 2, "ngram_vocab_size_base": 97}
    | {"split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1}
    | {"indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2},
}


def _by_taps_and_n_grams(mixer: Any) -> int:
    return mixer.short_conv_state_len + mixer.ple_embedding.context_len


FAMILY = Family(
    name="delta_rule",
    model_types=frozenset(_TYPES.split()),
    how="convolution and delta rule by documents; attention document by document",
    mixers={
        **{f"{model}GatedDeltaNet": _GATED_DELTA_RULE for model in _GATED.split()},
        **dict.fromkeys("BailingHybridDeltaAttention KimiLinearDeltaAttention".split(), _PER_CHANNEL_DECAY),
        "Qwen4ExpTextPLELayer": LookingBack(_by_taps_and_n_grams),
    },
    media_types=dict.fromkeys(["image", "video"], _WITH_MEDIA | _IN_ONE_ROW),
    tiny=Tiny(configs=_TINY, images={"grid": _WITH_MEDIA, "row of patches": _IN_ONE_ROW}),
)

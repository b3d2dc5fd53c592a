"""Mixers that carry a state or taps from one document into the next, alone or beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopack.family import DERIVED, Family, MixerCall, Tiny
from autopack.mixers import ROWS, Alone, AtOperations, EqualRows, Rows

# Lightning attention carries a sum over all tokens before.
LIGHTNING = Family(
    name="lightning",
    model_types=frozenset({"minimax"}),
    how="lightning attention on documents as rows; attention document by document",
    mixers={"MiniMaxLightningAttention": ROWS},
    tiny=Tiny(configs={"minimax": {"block_size": 8}}),
)


class _ForgettingRows(Rows):
    """Documents as rows for a block that keeps the state of its last call, which releases up to
    4.57 resume."""

    def run(self, call: MixerCall) -> Any:
        def from_nothing(mixer: Any, *args: Any, **kwargs: Any) -> Any:
            mixer.rg_lru.recurrent_states = None
            return call.original(mixer, *args, **kwargs)

        return super().run(replace(call, original=from_nothing))


# Upstream resets the recurrence where a position is 0, but its convolution reaches into the
# document before.
RG_LRU = Family(
    name="rg_lru",
    model_types=frozenset({"recurrent_gemma"}),
    how="recurrent block on documents as rows; attention document by document",
    mixers={"RecurrentGemmaRecurrentBlock": _ForgettingRows()},
    tiny=Tiny(configs={"recurrent_gemma": {"block_types": ["recurrent", "attention"]}}),
)


# Time mixing is a recurrence, and both halves of a block look at the token before.
RWKV = Family(
    name="rwkv",
    model_types=frozenset({"rwkv"}),
    how="time and channel mixing on documents as rows",
    attends=False,
    mixers={"RwkvFeedForward": ROWS, "RwkvSelfAttention": ROWS},
    tiny=Tiny(configs={"rwkv": {"attention_hidden_size": 64}}),
)

# Its memory is a matrix.
XLSTM = Family(
    name="xlstm",
    model_types=frozenset({"xlstm"}),
    how="memory cell on documents as rows",
    attends=False,
    mixers={"xLSTMLayer": ROWS},
    tiny=Tiny(configs={"xlstm": {"autocast_kernel_dtype": "float32"}}),
)

# State-space layers (Mamba, Mamba-2). Upstream restarts their convolution and scan only in CUDA
# kernels that take `seq_idx`.
_SPACES = """
bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemo_speechlm nemotron_h
nemotron_h_omni zamba zamba2
"""
_MAMBA = "FalconMambaMixer JambaMambaMixer MambaMixer ZambaMambaMixer"
_MAMBA_2 = "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer Zamba2MambaMixer"

_SELECTIVE_SCAN = AtOperations(("causal_conv1d_fn", "mamba_selective_scan"), fused="mamba_inner_fn")
# Up to 4.57 the state that chunks hand on in torch counts what follows it in the row.
_DUALITY = AtOperations(
    ("causal_conv1d_fn", "mamba2_chunk_scan"), fused="mamba2_split_conv1d_scan_combined", before=EqualRows()
)

_TINY_SPACES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    # older releases raise where their kernels are asked for and absent
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8},
    "nemotron_h_omni": {"projector_hidden_size": 64, "vision_hidden_size": 64, "image_token_id": 120}
    | {"audio_token_id": 119, "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64}},
    "zamba": {
        "use_mamba_kernels": False,
        "num_hidden_layers": 4,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
    }
    | {"layers_block_type": DERIVED, "attention_hidden_size": 128, "attention_head_dim": 32},
    # 5.0 ties every shared block to the one of layer 0, and does not run without rotation
    "zamba2": {"layers_block_type": ["hybrid", "mamba", "hybrid"], "adapter_rank": 8, "use_mem_rope": True},
}

STATE_SPACE = Family(
    name="state_space",
    model_types=frozenset(_SPACES.split()),
    how="convolution and scan by documents; attention document by document",
    mixers=dict.fromkeys(_MAMBA.split(), _SELECTIVE_SCAN) | dict.fromkeys(_MAMBA_2.split(), _DUALITY),
    why_no_media={
        "nemotron_h_omni": "it takes frames in groups over the videos of a call, so a frame of one "
        "joins those of the next (get_video_features)"
    },
    tiny=Tiny(configs=_TINY_SPACES, images={"grid of one frame": frozenset({"nemotron_h_omni"})}),
)

# Gated delta rules (linear attention): their convolution and the state of the rule go on, and so do
# Qwen4's n-grams.
_GATED_DELTA_RULE = AtOperations(("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))
_PER_CHANNEL_DECAY = AtOperations(("causal_conv1d_fn", "chunk_kimi_delta_attention"))

_RULES = """
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
_MARKERS = {
    "image_start_id": 104,
    "image_end_id": 105,
    "slice_start_id": 106,
    "slice_end_id": 107,
    "newline_id": 108,
}
_TINY_RULES: dict[str, dict[str, Any]] = {
    # small heads: the kernel in Python makes (heads, 64, 64, head) of every document, however short
    "bailing_hybrid": {"head_dim": 16, "linear_num_heads": 2},
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 8},
    "lara_mini": {
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
    },
    **dict.fromkeys(_IN_ONE_ROW, _PLACEHOLDERS | {"insert_layer_id": 0}),
    "minicpmv4_7": _PLACEHOLDERS | _MARKERS | {"insert_layer_id": 0},
    "qwen3_5_moe_text": _M_ROPE,
    "qwen3_5_text": _M_ROPE,
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen4_exp_text": _M_ROPE
    | {
        "layer_types": ["linear_attention", "indexed_attention"],
        "eos_token_id": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
    }
    | {"ple_layer_ids": [1], "ple_embed_dim": 64, "heads_per_ngram": 2, "ngram_vocab_size_base": 97}
    | {
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
    }
    | {"indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2},
}


DELTA_RULE = Family(
    name="delta_rule",
    model_types=frozenset(_RULES.split()),
    how="convolution and delta rule by documents; attention document by document",
    mixers={
        **{f"{model}GatedDeltaNet": _GATED_DELTA_RULE for model in _GATED.split()},
        **dict.fromkeys("BailingHybridDeltaAttention KimiLinearDeltaAttention".split(), _PER_CHANNEL_DECAY),
        "Qwen4ExpTextPLELayer": ROWS,
    },
    media_types={"video": _WITH_MEDIA | _IN_ONE_ROW},
    tiny=Tiny(configs=_TINY_RULES, images={"grid": _WITH_MEDIA, "row of patches": _IN_ONE_ROW}),
)

# Short convolutions, whose taps reach into the document before.
_CONVOLUTIONS = """
inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text lfm2 lfm2_moe
lfm2_vl lfm3 lfm3_vl zaya
"""
_AT_CONVOLUTION = """
Inkling2LoopShortConvolution Inkling2ShortConvolution InklingShortConvolution Lfm2MoeShortConv Lfm2ShortConv
Lfm3ShortConv
"""
_OVER_LAYERS = (  # each token over what earlier layers have made of it
    "Inkling2BlockAttentionResidual Inkling2LoopBlockAttentionResidual Inkling2LoopMessageAttentionResidual"
)

_FORMS = {"grid of tokens": "inkling2", "patches in time": "inkling_mm_model", "spatial patches": "lfm2_vl"}
_IMAGES = {form: frozenset({name}) for form, name in (_FORMS | {"grid": "lfm3_vl"}).items()}
_TINY_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1, "log_scaling_n_floor": 4, "num_hidden_layers": 4}
    | {"layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"]}
    | {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2},
    "inkling2_text": {"n_layers_per_attn_res_block": 1, "log_scaling_n_floor": 4},
    "inkling2_vision": {"text_hidden_size": 64},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"], "logits_mup_width_multiplier": 1.0}
    | {"log_scaling_n_floor": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 4}
    | {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


# Full attention of Inkling makes a bias of all pairs, and scales it and queries by columns; that of
# Inkling 2 scales by `position_ids`, which count padding on the left too, behind which its
# convolutions would start anew.
_BIASED = "InklingAttention Inkling2FullAttention Inkling2LoopFullAttention"

SHORT_CONVOLUTION = Family(
    name="short_convolution",
    model_types=frozenset(_CONVOLUTIONS.split()),
    how="taps masked at the start of each document; attention document by document",
    mixers={
        **dict.fromkeys(_AT_CONVOLUTION.split(), AtOperations(("causal_conv1d_fn",))),
        **dict.fromkeys(_BIASED.split(), Alone(by_columns=True)),
        "ZayaCCAProjection": ROWS,
    },
    within_token=frozenset(_OVER_LAYERS.split()),
    media_types={"video": frozenset({"lfm3_vl"})},
    tiny=Tiny(configs=_TINY_CONVOLUTIONS, images=_IMAGES),
)

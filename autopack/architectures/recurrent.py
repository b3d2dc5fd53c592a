"""Mixers that carry a state or taps from one document into the next, alone or beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopack.family import Family, MixerCall
from autopack.mixers import ROWS, Alone, AtOperations, EqualRows, Rows

# Lightning attention carries a sum over all tokens before.
LIGHTNING = Family.of(
    "lightning",
    "minimax",
    "lightning attention on documents as rows; attention document by document",
    mixers={"MiniMaxLightningAttention": ROWS},
)


class _ForgettingRows(Rows):
    """Strategy `Rows` for a block that would resume the state of its last call (up to 4.57)."""

    def run(self, call: MixerCall) -> Any:
        def from_nothing(mixer: Any, *args: Any, **kwargs: Any) -> Any:
            mixer.rg_lru.recurrent_states = None
            return call.original(mixer, *args, **kwargs)

        return super().run(replace(call, original=from_nothing))


# Upstream resets the recurrence where a position is 0, but its convolution reaches into the
# document before.
RG_LRU = Family.of(
    "rg_lru",
    "recurrent_gemma",
    "recurrent block on documents as rows; attention document by document",
    mixers={"RecurrentGemmaRecurrentBlock": _ForgettingRows()},
)


# Time mixing is a recurrence, and both halves of a block look at the token before.
RWKV = Family.of(
    "rwkv",
    "rwkv",
    "time and channel mixing on documents as rows",
    mixers={"RwkvFeedForward RwkvSelfAttention": ROWS},
)

# Its memory is a matrix.
XLSTM = Family.of("xlstm", "xlstm", "memory cell on documents as rows", mixers={"xLSTMLayer": ROWS})

# State-space layers (Mamba, Mamba-2). Upstream restarts their convolution and scan only in CUDA
# kernels that take `seq_idx`.
_SPACES = """
bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemo_speechlm nemotron_h
nemotron_h_omni zamba zamba2
"""
_MAMBA = "FalconMambaMixer JambaMambaMixer MambaMixer ZambaMambaMixer"
_MAMBA_2 = (
    "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer "
    "Zamba2MambaMixer"
)

_SELECTIVE_SCAN = AtOperations(("causal_conv1d_fn", "mamba_selective_scan"), fused="mamba_inner_fn")
# Up to 4.57 the state that chunks hand on in torch counts what follows it in the row.
_DUALITY = AtOperations(
    ("causal_conv1d_fn", "mamba2_chunk_scan"),
    fused="mamba2_split_conv1d_scan_combined",
    before=EqualRows(),
)


STATE_SPACE = Family.of(
    "state_space",
    _SPACES,
    "convolution and scan by documents; attention document by document",
    mixers={_MAMBA: _SELECTIVE_SCAN, _MAMBA_2: _DUALITY},
    why_no_media={
        "nemotron_h_omni": "it takes frames in groups over the videos of a call, so a frame of one "
        "joins those of the next (get_video_features)"
    },
)

# Gated delta rules (linear attention): their convolution and the state of the rule go on, and so do
# Qwen4's n-grams.
_GATED_DELTA_RULE = AtOperations(("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))
_PER_CHANNEL_DECAY = AtOperations(("causal_conv1d_fn", "chunk_kimi_delta_attention"))

_RULES = """
bailing_hybrid kimi_linear lara_mini minicpm_ocr minicpmv4_6 minicpmv4_7 olmo_hybrid qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
"""
_GATED = """
LaraMiniGatedDeltaNet OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet
Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet
"""


DELTA_RULE = Family.of(
    "delta_rule",
    _RULES,
    "convolution and delta rule by documents; attention document by document",
    mixers={
        _GATED: _GATED_DELTA_RULE,
        "BailingHybridDeltaAttention KimiLinearDeltaAttention": _PER_CHANNEL_DECAY,
        "Qwen4ExpTextPLELayer": ROWS,
    },
    media_types={"video": "qwen3_5 qwen3_5_moe qwen4_exp minicpm_ocr minicpmv4_6 minicpmv4_7"},
)

# Short convolutions, whose taps reach into the document before.
_CONVOLUTIONS = """
inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text lfm2 lfm2_moe
lfm2_vl lfm3 lfm3_vl zaya
"""
_AT_CONVOLUTION = """
Inkling2LoopShortConvolution Inkling2ShortConvolution InklingShortConvolution Lfm2MoeShortConv
Lfm2ShortConv Lfm3ShortConv
"""
_OVER_LAYERS = (  # each token over what earlier layers have made of it
    "Inkling2BlockAttentionResidual Inkling2LoopBlockAttentionResidual "
    "Inkling2LoopMessageAttentionResidual"
)

# Full attention of Inkling makes a bias of all pairs, and scales it and queries by columns; that of
# Inkling 2 scales by `position_ids`, which count padding on the left too, behind which its
# convolutions would start anew.
_BIASED = "InklingAttention Inkling2FullAttention Inkling2LoopFullAttention"

SHORT_CONVOLUTION = Family.of(
    "short_convolution",
    _CONVOLUTIONS,
    "taps masked at the start of each document; attention document by document",
    mixers={
        _AT_CONVOLUTION: AtOperations(("causal_conv1d_fn",)),
        _BIASED: Alone(by_columns=True),
        "ZayaCCAProjection": ROWS,
    },
    within_token=_OVER_LAYERS,
    media_types={"video": "lfm3_vl"},
)

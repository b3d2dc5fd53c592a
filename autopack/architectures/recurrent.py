"""Mixers that carry a state or taps from one document into the next, alone or beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopack.family import Family, MixerCall, Tiny, named
from autopack.mixers import ROWS, Alone, AtOperations, EqualRows, Rows

# Lightning attention carries a sum over all tokens before.
LIGHTNING = Family(
    name="lightning",
    model_types=named("minimax"),
    how="lightning attention on documents as rows; attention document by document",
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
RG_LRU = Family(
    name="rg_lru",
    model_types=named("recurrent_gemma"),
    how="recurrent block on documents as rows; attention document by document",
    mixers={"RecurrentGemmaRecurrentBlock": _ForgettingRows()},
)


# Time mixing is a recurrence, and both halves of a block look at the token before.
RWKV = Family(
    name="rwkv",
    model_types=named("rwkv"),
    how="time and channel mixing on documents as rows",
    mixers={"RwkvFeedForward": ROWS, "RwkvSelfAttention": ROWS},
)

# Its memory is a matrix.
XLSTM = Family(
    name="xlstm",
    model_types=named("xlstm"),
    how="memory cell on documents as rows",
    mixers={"xLSTMLayer": ROWS},
)

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


STATE_SPACE = Family(
    name="state_space",
    model_types=named(_SPACES),
    how="convolution and scan by documents; attention document by document",
    mixers=dict.fromkeys(_MAMBA.split(), _SELECTIVE_SCAN)
    | dict.fromkeys(_MAMBA_2.split(), _DUALITY),
    why_no_media={
        "nemotron_h_omni": "it takes frames in groups over the videos of a call, so a frame of one "
        "joins those of the next (get_video_features)"
    },
    tiny=Tiny(images={"grid of one frame": named("nemotron_h_omni")}),
)

# Gated delta rules (linear attention): their convolution and the state of the rule go on, and so do
# Qwen4's n-grams.
_GATED_DELTA_RULE = AtOperations(("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))
_PER_CHANNEL_DECAY = AtOperations(("causal_conv1d_fn", "chunk_kimi_delta_attention"))

_RULES = """
bailing_hybrid kimi_linear lara_mini minicpm_ocr minicpmv4_6 minicpmv4_7 olmo_hybrid qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
"""
_GATED = "LaraMini OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4ExpText"
_WITH_MEDIA = named("qwen3_5 qwen3_5_moe qwen4_exp")
_IN_ONE_ROW = named("minicpm_ocr minicpmv4_6 minicpmv4_7")
"""Types that take the patches of all images as one row."""


DELTA_RULE = Family(
    name="delta_rule",
    model_types=named(_RULES),
    how="convolution and delta rule by documents; attention document by document",
    mixers={
        **{f"{model}GatedDeltaNet": _GATED_DELTA_RULE for model in _GATED.split()},
        **dict.fromkeys(
            "BailingHybridDeltaAttention KimiLinearDeltaAttention".split(), _PER_CHANNEL_DECAY
        ),
        "Qwen4ExpTextPLELayer": ROWS,
    },
    media_types={"video": _WITH_MEDIA | _IN_ONE_ROW},
    tiny=Tiny(images={"grid": _WITH_MEDIA, "row of patches": _IN_ONE_ROW}),
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

_FORMS = {
    "grid of tokens": "inkling2",
    "patches in time": "inkling_mm_model",
    "spatial patches": "lfm2_vl",
}
_IMAGES = {form: named(name) for form, name in (_FORMS | {"grid": "lfm3_vl"}).items()}


# Full attention of Inkling makes a bias of all pairs, and scales it and queries by columns; that of
# Inkling 2 scales by `position_ids`, which count padding on the left too, behind which its
# convolutions would start anew.
_BIASED = "InklingAttention Inkling2FullAttention Inkling2LoopFullAttention"

SHORT_CONVOLUTION = Family(
    name="short_convolution",
    model_types=named(_CONVOLUTIONS),
    how="taps masked at the start of each document; attention document by document",
    mixers={
        **dict.fromkeys(_AT_CONVOLUTION.split(), AtOperations(("causal_conv1d_fn",))),
        **dict.fromkeys(_BIASED.split(), Alone(by_columns=True)),
        "ZayaCCAProjection": ROWS,
    },
    within_token=named(_OVER_LAYERS),
    media_types={"video": named("lfm3_vl")},
    tiny=Tiny(images=_IMAGES),
)

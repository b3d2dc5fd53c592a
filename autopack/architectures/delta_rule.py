"""Hybrids of attention and gated delta rules (linear attention).

Their convolution and the state of the rule go on from one document into the next, and so do Qwen4's n-grams.
"""

from typing import Any

from autopack.family import Family
from autopack.mixers import AtOperations, LookingBack

__all__ = ["FAMILY"]

_GATED_DELTA_RULE = AtOperations(("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))
_PER_CHANNEL_DECAY = AtOperations(("causal_conv1d_fn", "chunk_kimi_delta_attention"))


def _by_taps_and_n_grams(mixer: Any) -> int:
    return mixer.short_conv_state_len + mixer.ple_embedding.context_len


FAMILY = Family(
    name="delta_rule",
    model_types=frozenset(
        {
            "bailing_hybrid",
            "kimi_linear",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
            "olmo_hybrid",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "qwen4_exp",
            "qwen4_exp_text",
        }
    ),
    path="convolution and delta rule by documents; attention document by document",
    mixers=dict.fromkeys(["BailingHybridDeltaAttention", "KimiLinearDeltaAttention"], _PER_CHANNEL_DECAY)
    | dict.fromkeys(
        [
            "OlmoHybridGatedDeltaNet",
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "Qwen4ExpTextGatedDeltaNet",
        ],
        _GATED_DELTA_RULE,
    )
    | {"Qwen4ExpTextPLELayer": LookingBack(_by_taps_and_n_grams)},
)

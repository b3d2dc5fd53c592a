"""Hybrids of attention and gated delta rules (linear attention).

Their convolution and the state of the rule go on from one document into the next, and so do Qwen4's n-grams.
"""

from autopack.architectures import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="delta_rule",
    model_types=frozenset(
        {
            "bailing_hybrid",
            "kimi_linear",
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
    path="delta rule on documents as rows; attention document by document",
    mixers=frozenset(
        {
            "BailingHybridDeltaAttention",
            "KimiLinearDeltaAttention",
            "OlmoHybridGatedDeltaNet",
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "Qwen4ExpTextGatedDeltaNet",
            "Qwen4ExpTextPLELayer",
        }
    ),
)

"""Decoders and encoders whose attention is code of their own, and whose position_ids say where a document begins."""

from typing import Any

from autopack.family import Family, Tiny
from autopack.mixers import ALONE

_TYPES = "codegen falcon gpt_neo gpt_neox_japanese gptj megatron-bert openai-gpt rembert xglm"
_ATTENTION = """
CodeGenAttention FalconAttention GPTJAttention GPTNeoSelfAttention GPTNeoXJapaneseAttention MegatronBertSelfAttention
RemBertSelfAttention XGLMAttention
"""


def _refusal(config: Any) -> str | None:
    if config.model_type == "falcon" and config.alibi:
        return "it rounds biases by distance to bfloat16, counted from the start of the row, and adds them to the mask"
    return None


FAMILY = Family(
    name="own_attention",
    model_types=frozenset(_TYPES.split()),
    how="the model's own attention, documents alone",
    attends=False,
    mixers={
        **dict.fromkeys(_ATTENTION.split(), ALONE),
        "Attention": ALONE,  # OpenAI GPT's
    },
    refusal=_refusal,
    tiny=Tiny(
        configs={
            "falcon": {"new_decoder_architecture": True},
            "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
            "transfo-xl": {"cutoffs": [32, 64], "d_embed": 64, "div_val": 1},
        },
        causal={name: {"is_decoder": True} for name in ("megatron-bert", "rembert")},
    ),
)

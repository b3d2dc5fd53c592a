"""Decoders and encoders whose attention is code of their own, and whose position_ids say where a document begins."""

from typing import Any

from autopack.family import Family
from autopack.mixers import ALONE, Alone

__all__ = ["FAMILY"]


def _refusal(config: Any) -> str | None:
    if config.model_type == "falcon" and config.alibi:
        return "it rounds biases by distance to bfloat16, counted from the start of the row, and adds them to the mask"
    return None


FAMILY = Family(
    name="own_attention",
    model_types=frozenset(
        {
            "codegen",
            "falcon",
            "gpt_neo",
            "gpt_neox_japanese",
            "gptj",
            "megatron-bert",
            "openai-gpt",
            "rembert",
            "xglm",
            "xlm",
        }
    ),
    path="the model's own attention, documents alone",
    attends=False,
    mixers={
        **dict.fromkeys(
            [
                "Attention",  # OpenAI GPT's
                "CodeGenAttention",
                "FalconAttention",
                "GPTJAttention",
                "GPTNeoSelfAttention",
                "GPTNeoXJapaneseAttention",
                "MegatronBertSelfAttention",
                "RemBertSelfAttention",
                "XGLMAttention",
            ],
            ALONE,
        ),
        "MultiHeadAttention": Alone(by_columns=True),  # XLM's
    },
    refusal=_refusal,
)

"""Decoders and encoders whose attention is code of their own, and whose position_ids say where a document begins."""

from autopack.architectures import Family
from autopack.mixers import ALONE, Alone

__all__ = ["FAMILY"]

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
    mixers={
        **dict.fromkeys(
            [
                "Attention",  # OpenAI GPT's
                "CodeGenAttention",
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
        "FalconAttention": Alone(per_head=("alibi",)),
    },
)

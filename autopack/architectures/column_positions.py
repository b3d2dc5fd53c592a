"""Decoders of the BART kind: they number tokens by columns and take no position_ids.

Their embeddings of positions give every document those of the first columns; most have attention through transformers'
interface, the others are run on documents alone.
"""

from typing import Any

from autopack.family import Family
from autopack.mixers import ALONE, RESTARTING, ROWS

__all__ = ["FAMILY"]


def _refusal(config: Any) -> str | None:
    if config.is_encoder_decoder and getattr(config, "attention_type", None) == "block_sparse":
        return (
            "BigBirdPegasusBlockSparseAttention of its encoder lets blocks of the row see its first and last block and "
            "random ones, and a short row as a whole; load it with attention_type='original_full'"
        )
    return None


FAMILY = Family(
    name="column_positions",
    model_types=frozenset(
        {
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "m2m_100",
            "marian",
            "mbart",
            "musicgen_decoder",
            "musicgen_melody_decoder",
            "mvp",
            "pegasus",
            "plbart",
            "seamless_m4t",
            "seamless_m4t_v2",
            "speech_to_text",
            "trocr",
        }
    ),
    path="positions restarted; attention document by document",
    positions=False,
    media_types={"sound": frozenset({"speech_to_text"})},
    refusal=_refusal,
    mixers={
        **dict.fromkeys(
            [
                "BartLearnedPositionalEmbedding",
                "BigBirdPegasusLearnedPositionalEmbedding",
                "BlenderbotLearnedPositionalEmbedding",
                "BlenderbotSmallLearnedPositionalEmbedding",
                "MBartLearnedPositionalEmbedding",
                "MarianSinusoidalPositionalEmbedding",
                "MusicgenMelodySinusoidalPositionalEmbedding",
                "MusicgenSinusoidalPositionalEmbedding",
                "MvpLearnedPositionalEmbedding",
                "PLBartLearnedPositionalEmbedding",
                "PegasusSinusoidalPositionalEmbedding",
                "TrOCRLearnedPositionalEmbedding",
            ],
            RESTARTING,
        ),
        # these number tokens that are no padding
        "M2M100SinusoidalPositionalEmbedding": ROWS,
        "SeamlessM4TSinusoidalPositionalEmbedding": ROWS,
        "SeamlessM4Tv2SinusoidalPositionalEmbedding": ROWS,
        "Speech2TextSinusoidalPositionalEmbedding": ROWS,
        "TrOCRSinusoidalPositionalEmbedding": ROWS,
        **dict.fromkeys(["BigBirdPegasusSelfAttention", "MvpAttention", "TrOCRAttention"], ALONE),
    },
)

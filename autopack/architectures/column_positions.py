"""Decoders of the BART kind: they number tokens by columns and take no position_ids.

Their embeddings of positions give every document those of the first columns; most have attention through transformers'
interface, the others are run on documents alone.
"""

from autopack.architectures import Family
from autopack.mixers import ALONE, RESTARTING, ROWS

__all__ = ["FAMILY"]

FAMILY = Family(
    name="column_positions",
    model_types=frozenset(
        {
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "musicgen_decoder",
            "musicgen_melody_decoder",
            "mvp",
            "pegasus",
            "plbart",
            "trocr",
        }
    ),
    path="positions restarted; attention document by document",
    positions=False,
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
        "TrOCRSinusoidalPositionalEmbedding": ROWS,  # it numbers tokens that are no padding
        **dict.fromkeys(["MvpAttention", "TrOCRAttention"], ALONE),
    },
)

"""Decoders of the BART kind: they number tokens by columns and take no position_ids.

Their embeddings of positions give every document those of the first columns; most have attention through transformers'
interface, the others are run on documents alone.
"""

from __future__ import annotations

from typing import Any

from autopack.family import Family, Tiny
from autopack.mixers import ALONE, RESTARTING, ROWS

_TYPES = """
bart bigbird_pegasus blenderbot blenderbot-small florence2 m2m_100 marian mbart musicgen_decoder
musicgen_melody_decoder mvp pegasus plbart seamless_m4t seamless_m4t_v2 speech_to_text trocr
"""
_LEARNED = "Bart BigBirdPegasus Blenderbot BlenderbotSmall MBart Mvp PLBart TrOCR"
_SINUSOIDAL = "Marian Musicgen MusicgenMelody Pegasus"
_NUMBERING_NO_PADDING = "M2M100 SeamlessM4T SeamlessM4Tv2 Speech2Text TrOCR"
"""Those whose sinusoidal embeddings number the tokens that are no padding."""
_MUSICGEN = ("musicgen", "musicgen_melody")
_FLORENCE_VISION = (
    {"depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "projection_dim": 64}
    | {"patch_prenorm": [False, True], "embed_dim": [32, 64], "num_heads": [2, 4], "num_groups": [2, 4]}
    | {"window_size": 3}
)
_MUSICGEN_PARTS = {"text_encoder": "t5", "audio_encoder": "encodec"}


def _refusal(config: Any) -> str | None:
    if config.is_encoder_decoder and getattr(config, "attention_type", None) == "block_sparse":
        return (
            "what its block-sparse encoder gives a document depends on the calls before, since a short row makes it "
            "attend fully for good (BigBirdPegasusEncoder.forward: `self.set_attention_type('original_full')`); load "
            "it with attention_type='original_full'"
        )
    return None


FAMILY = Family(
    name="column_positions",
    model_types=frozenset(_TYPES.split()),
    how="positions restarted; attention document by document",
    positions=False,
    media_types={"sound": frozenset({"speech_to_text"}), "image": frozenset({"florence2"})},
    refusal=_refusal,
    mixers={
        **{f"{model}LearnedPositionalEmbedding": RESTARTING for model in _LEARNED.split()},
        **{f"{model}SinusoidalPositionalEmbedding": RESTARTING for model in _SINUSOIDAL.split()},
        **{f"{model}SinusoidalPositionalEmbedding": ROWS for model in _NUMBERING_NO_PADDING.split()},
        **dict.fromkeys("BigBirdPegasusSelfAttention MvpAttention TrOCRAttention".split(), ALONE),
    },
    tiny=Tiny(
        configs={name: {"decoder": {"num_codebooks": 1}} for name in _MUSICGEN} | {"florence_vision": _FLORENCE_VISION},
        parts={name: {**_MUSICGEN_PARTS, "decoder": f"{name}_decoder"} for name in _MUSICGEN},
        images={"square": frozenset({"florence2"})},
    ),
)

"""Encoders with code of their own: relative distances, convolutions beside attention, Fourier transforms."""

from __future__ import annotations

from typing import Any

from autopack.family import AFTER_PAD_TOKEN, Family, Numbering, Tiny
from autopack.mixers import ALONE, Alone

_BY_PAIRS = Alone(by_columns=True)
_READING_PADDING = Alone(by_columns=True, reads_padding=True)

_TYPES = "convbert deberta deberta-v2 fnet ibert luke mpnet nystromformer squeezebert yoso"


def _refusal(config: Any) -> str | None:
    if config.model_type == "ibert" and config.quant_mode:
        return (
            "with quant_mode=True its QuantAct modules quantise all tokens of a batch by one range, and in training "
            "move that range along with every batch; load it with quant_mode=False"
        )
    if config.model_type == "nystromformer" and config.num_landmarks != config.segment_means_seq_len:
        return (
            "NystromformerSelfAttention takes the means of segments of a row of exactly segment_means_seq_len = "
            f"{config.segment_means_seq_len} columns, padding included, for its {config.num_landmarks} landmarks, so a "
            f"document of another length has no result of its own; with num_landmarks=segment_means_seq_len it attends "
            f"to all tokens"
        )
    if config.model_type == "yoso" and not config.use_expectation:
        return (
            "with use_expectation=False YosoSelfAttention draws new random hashes at every call, so not even two runs "
            "of one document agree; load it with use_expectation=True"
        )
    return None


FAMILY = Family(
    name="own_encoders",
    model_types=frozenset(_TYPES.split()),
    how="the model's own attention, documents alone",
    attends=False,
    mixers={
        "ConvBertSelfAttention": _READING_PADDING,
        "ConvLayer": _READING_PADDING,  # DeBERTa-v2's, where conv_kernel_size is set
        "DisentangledSelfAttention": _BY_PAIRS,
        "FNetBasicFourierTransform": _READING_PADDING,
        "IBertSelfAttention": ALONE,
        "LukeSelfAttention": _BY_PAIRS,
        "MPNetSelfAttention": _BY_PAIRS,
        "NystromformerSelfAttention": _READING_PADDING,  # by the convolution of its values
        "SqueezeBertSelfAttention": Alone(channels_first=True),
        "YosoSelfAttention": _READING_PADDING,  # its mask is one for padding and tokens alike
    },
    refused_arguments={"entity_ids": "entities stand beside the row, and whose document they are of is not said"},
    refusal=_refusal,
    numbering=dict.fromkeys("ibert luke".split(), AFTER_PAD_TOKEN)
    | dict.fromkeys("nystromformer yoso".split(), Numbering(start=2))
    | {"mpnet": Numbering(start=2, uncounted=1)},
    tiny=Tiny(configs={"luke": {"entity_vocab_size": 128, "entity_emb_size": 16}}),
)

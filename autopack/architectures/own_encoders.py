"""Encoders with code of their own: relative distances, convolutions beside attention, Fourier transforms."""

from autopack.architectures import Family
from autopack.mixers import Alone

__all__ = ["FAMILY"]

_BY_PAIRS = Alone(by_columns=True)
_READING_PADDING = Alone(by_columns=True, reads_padding=True)

FAMILY = Family(
    name="own_encoders",
    model_types=frozenset({"convbert", "deberta", "deberta-v2", "flaubert", "fnet", "luke", "mpnet"}),
    path="the model's own attention, documents alone",
    attends=False,
    mixers={
        "ConvBertSelfAttention": _READING_PADDING,
        "ConvLayer": _READING_PADDING,  # DeBERTa-v2's, where conv_kernel_size is set
        "DisentangledSelfAttention": _BY_PAIRS,
        "FNetBasicFourierTransform": _READING_PADDING,
        "LukeSelfAttention": _BY_PAIRS,
        "MPNetSelfAttention": _BY_PAIRS,
        "MultiHeadAttention": _BY_PAIRS,  # Flaubert's
    },
    refused_arguments={"entity_ids": "entities stand beside the row, and whose document they are of is not said"},
)

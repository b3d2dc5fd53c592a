"""Hybrids of attention and short convolutions, whose taps reach into the document before."""

from typing import Any

from autopack.family import Family
from autopack.mixers import AtOperations, LookingBack

__all__ = ["FAMILY"]


def _by_its_taps(mixer: Any) -> int | None:
    width = getattr(mixer, "conv_kernel_size", None)  # releases before 5.23 have other names
    return None if width is None else width - 1


def _by_convolutions_or_delayed_value(mixer: Any) -> int | None:
    taps = getattr(mixer, "conv_kernel_size", None)  # of both convolutions, the present token not counted
    return None if taps is None else max(taps, 1)


_TYPES = "inkling2 inkling2_text inkling_text lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl zaya"

FAMILY = Family(
    name="short_convolution",
    model_types=frozenset(
        {"inkling2", "inkling2_text", "inkling_text", "lfm2", "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl", "zaya"}
    ),
    path="taps masked at the start of each document; attention document by document",
    mixers=dict.fromkeys(
        [
            "Inkling2ShortConvolution",
            "InklingShortConvolution",
            "Lfm2MoeShortConv",
            "Lfm2ShortConv",
            "Lfm3ShortConv",
        ],
        AtOperations(("causal_conv1d_fn",)),
    )
    | {
        "Inkling2DynamicShortConvolution": LookingBack(_by_its_taps),
        "ZayaCCAProjection": LookingBack(_by_convolutions_or_delayed_value),
    },
)

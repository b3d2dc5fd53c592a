"""Hybrids of attention and short convolutions, whose taps reach into the document before."""

from autopack.architectures import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="short_convolution",
    model_types=frozenset({"inkling2_text", "inkling_text", "lfm2", "lfm2_moe", "lfm3", "zaya"}),
    path="convolution on documents as rows; attention document by document",
    mixers=frozenset(
        {
            "Inkling2DynamicShortConvolution",
            "Inkling2ShortConvolution",
            "InklingShortConvolution",
            "Lfm2MoeShortConv",
            "Lfm2ShortConv",
            "Lfm3ShortConv",
            "ZayaCCAProjection",
        }
    ),
)

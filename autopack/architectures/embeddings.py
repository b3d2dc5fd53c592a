"""Attention through the interface, and embeddings that look at more than one token: they run on documents alone."""

from __future__ import annotations

from typing import Any

from autopack.family import Family, MixerCall, Tiny, Way
from autopack.mixers import ALONE, Alone, Rows


class _EmbeddedAlone(Way):
    """ESM's, which with `token_dropout` are scaled by the share of mask tokens in a row."""

    recurs = False
    words = "embedded alone"
    work = "the embedding itself, documents of one length as a batch"

    def run(self, call: MixerCall) -> Any:
        if not getattr(call.mixer, "token_dropout", True):
            return call.changed(lambda name, value: value)
        return ALONE.run(call)


ESM = Family(
    name="esm",
    model_types=frozenset({"esm"}),
    how="attention site, document by document; embeddings of documents alone",
    mixers={"EsmEmbeddings": _EmbeddedAlone()},
    tiny=Tiny(configs={"esm": {"token_dropout": True, "mask_token_id": 4}}),
)

# It joins each token with its left and right neighbour.
MOBILEBERT = Family(
    name="mobilebert",
    model_types=frozenset({"mobilebert"}),
    how="embeddings of documents alone; attention document by document",
    mixers={"MobileBertEmbeddings": Alone(reads_padding=True)},
    tiny=Tiny(configs={"mobilebert": {"embedding_size": 32}}),
)


class _ByDocument(Rows):
    """Those of CLIP's kind, which look at each token by itself, and refuse rows of more columns than positions.

    What the towers pick of every row is looked after where outputs are (`calls.of_rows`).
    """

    recurs = False


_TOWERS = "CLIP CLIPSeg MetaClip2 OwlViT Owlv2 Siglip Siglip2 Tipsv2 XCLIP"
_TYPES = """
clip_text_model clipseg_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model siglip2_text_model
siglip_text_model tipsv2_text_model xclip_text_model
"""

TEXT_TOWERS = Family(
    name="text_towers",
    model_types=frozenset(_TYPES.split()),
    how="attention site, document by document; embeddings of documents as rows",
    mixers={f"{name}TextEmbeddings": _ByDocument() for name in _TOWERS.split()},
)

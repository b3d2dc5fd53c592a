"""Text towers of CLIP's kind, whose embeddings refuse rows of more columns than there are positions.

Embeddings get the documents as rows, so that a row may be longer than any document may be. What the towers pick of
every row is looked after where outputs are (`calls.of_rows`).
"""

from autopack.family import Family
from autopack.mixers import Rows


class _ByDocument(Rows):
    """Documents as rows of what looks at each token by itself, and at the number of columns."""

    recurs = False


_TOWERS = "CLIP CLIPSeg MetaClip2 OwlViT Owlv2 Siglip Siglip2 Tipsv2 XCLIP"
_TYPES = """
clip_text_model clipseg_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model siglip2_text_model
siglip_text_model tipsv2_text_model xclip_text_model
"""

FAMILY = Family(
    name="text_towers",
    model_types=frozenset(_TYPES.split()),
    how="attention site, document by document; embeddings of documents as rows",
    mixers={f"{name}TextEmbeddings": _ByDocument() for name in _TOWERS.split()},
)

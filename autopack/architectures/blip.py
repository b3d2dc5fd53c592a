"""BLIP: captions attend across to their image, one for each document, in code of their own."""

from autopack.family import Family, Tiny
from autopack.mixers import ALONE

_TYPES = frozenset({"blip"})

FAMILY = Family(
    name="blip",
    model_types=_TYPES,
    how="the model's own attention, documents alone, and across to the image of each",
    attends=False,
    mixers={"BlipTextSelfAttention": ALONE},
    media_types={"image": _TYPES},
    image_of_each=_TYPES,
    tiny=Tiny(needs_images=_TYPES, images={"square beside text": _TYPES}),
)

"""Molmo2: each place of an image names the patches that it pools by their numbers among all images of the call.

Its processor counts over all images that it is given at once. What it has made of documents one by one counts from 0
in each, and laid end to end all would pool the patches of the first image, so packed calls are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autopack.family import DERIVED, Family, Tiny
from autopack.layout.host import host_values

_NUMBERS, _GRIDS, _CROPS = "image_token_pooling", "image_grids", "image_num_crops"


def _misplaced(given: Mapping[str, Any]) -> str | None:
    """Why the numbers of patches are not those of each image's own among all images of the call, or None."""
    pixels = given.get("pixel_values")
    if pixels is None:
        return None
    lacking = next((name for name in (_NUMBERS, _GRIDS, _CROPS) if given.get(name) is None), None)
    if lacking is not None:
        return f"{lacking} is missing, and only it tells whose patches are pooled; pass what the processor gives"
    numbers, grids, crops = (host_values(given[name]) for name in (_NUMBERS, _GRIDS, _CROPS))
    numbers = numbers[(numbers >= 0).any(axis=-1)]  # the model leaves out places without patches
    places = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
    each = pixels.shape[-2]  # patches of a crop
    if len(crops) != len(grids) or places.sum() != len(numbers) or crops.sum() * each != np.prod(pixels.shape[:-1]):
        return f"{_NUMBERS}, {_GRIDS}, {_CROPS} and pixel_values are not of the same images"
    ends = np.repeat(np.cumsum(crops), places) * each
    starts = ends - np.repeat(crops, places) * each
    within = (numbers < 0) | ((numbers >= starts[:, None]) & (numbers < ends[:, None]))
    if within.all():
        return None
    image = int(np.searchsorted(np.cumsum(places), np.argmin(within.all(axis=-1)), side="right"))
    return (
        f"{_NUMBERS} of image {image} names patches of other images. It counts over all images of the call; where each "
        f"document was processed by itself, add the patches before it, as autopack.PackingCollator does"
    )


FAMILY = Family(
    name="molmo2",
    model_types=frozenset({"molmo2"}),
    how="attention site, document by document; numbers of patches over all images of a call",
    media_types={"image": frozenset({"molmo2"})},
    wrong_media=_misplaced,
    tiny=Tiny(
        configs={
            "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64, "head_dim": 16}}
            | {"image_patch_id": 120},
            "molmo2_adapter": {"num_key_value_heads": 4},
            "molmo2_text": {"rope_scaling_layers": [0]},
            "molmo2_vision": {"image_size": [16, 32], "num_key_value_heads": 4, "num_position_embeddings": DERIVED},
        },
        images={"numbered patches": frozenset({"molmo2"})},
    ),
)

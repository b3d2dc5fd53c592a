"""Arguments of a call that hold media: images, videos, sounds and others that accompany tokens.

Media have no place in a row of tokens. Their features replace placeholder tokens, both in order, so
media in the order of the documents reach their own documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PICTURES = ("images", "image")
"""Picture columns of data sets: one, several or none per document; a list for each packed row."""
STATES = "image_hidden_states"
"""The output field with the states of images, in the order of the images, not the tokens."""
_NAMES = re.compile(
    r"pixel|image|video|audio|protein|patches|input_features|input_values|encoder_outputs"
    r"|target_sizes|qformer"
    r"|^aspect_ratio_|cross_attention_mask"
    r"|feature_attention_mask|^chunk_sample_lengths$|^padding_mask$"
)
_OTHERS = re.compile(
    r"^(vision_feature|output_|use_|num_(?!local_patches|frames_per_video))|token_type"
    r"|position_mask|patches_indices|codes"
)
"""Arguments that only choose how media are read, or describe every token."""
_KINDS = {
    "sound": r"audio|input_features|input_values|feature_attention|chunk_sample|padding_mask",
    "protein": "protein",
    "video": "video",
}


def holds_media(name: str) -> bool:
    """Return True if an argument of this name holds media, or their sizes, not facts on tokens."""
    return bool(_NAMES.search(name)) and not _OTHERS.search(name)


def given(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments that hold media in this call."""
    return [
        name
        for name, value in arguments.items()
        if value is not None and not isinstance(value, bool | int | str) and holds_media(name)
    ]


def kinds(name: str, value: Any) -> set[str]:
    """Return the kinds of media in an argument: "image", "video", "sound" or "protein".

    Encoder outputs by kind may hold several.
    """
    if isinstance(value, Mapping):
        return {kind for key in value for kind in kinds(key, None)}
    return {next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "image")}

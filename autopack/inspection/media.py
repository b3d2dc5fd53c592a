"""Images, videos, sounds and other media that come along with tokens: which arguments of a call hold them.

Media have no place in a row of tokens. Their features take the places of placeholder tokens, in the order in which both
come, so media in the order of the documents reach the documents that they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PICTURES = ("images", "image")
"""Columns of pictures of data sets: one, several or none for each document; those of a packed row in a list."""
STATES = "image_hidden_states"
"""What models name the states of images among their results: in the order of the images, however tokens lie."""
_NAMES = re.compile(
    r"pixel|image|video|audio|protein|patches|input_features|input_values|encoder_outputs|target_sizes|qformer"
    r"|aspect_ratio|cross_attention_mask"
    r"|feature_attention_mask|^chunk_sample_lengths$|^padding_mask$"
)
_OTHERS = re.compile(
    r"^(vision_feature|output_|use_|num_(?!local_patches|frames_per_video))|token_type|position_mask|patches_indices|codes"
)
"""Arguments that only choose how media are read, or say something of every token."""
_KINDS = {
    "sound": r"audio|input_features|input_values|feature_attention|chunk_sample|padding_mask",
    "protein": "protein",
    "video": "video",
}


def holds_media(name: str) -> bool:
    """Whether an argument of this name holds media, or says of what size they are, rather than something of tokens."""
    return bool(_NAMES.search(name)) and not _OTHERS.search(name)


def given(arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that hold media in this call."""
    return [
        name
        for name, value in arguments.items()
        if value is not None and not isinstance(value, bool | int | str) and holds_media(name)
    ]


def kinds(name: str, value: Any) -> set[str]:
    """What an argument holds: "image", "video", "sound" or "protein"; encoder outputs by kind may hold several."""
    if isinstance(value, Mapping):
        return {kind for key in value for kind in kinds(key, None)}
    return {next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "image")}

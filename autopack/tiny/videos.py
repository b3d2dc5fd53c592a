"""Documents with videos in the place of their images, for types that take both."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.tiny import images
from autopack.tiny.images import Document

_OF_FRAMES = {
    "pixel_values": "pixel_values_videos",
    "image_grid_thw": "video_grid_thw",
    "image_merge_sizes": "video_merge_sizes",
    "target_sizes": "target_sizes_videos",
    "image_position_ids": "video_position_ids",
}
_AS_IMAGES = frozenset("glm46v glm4v glm4v_moe glm_ocr glmga".split())
"""Types whose videos have the placeholders of images; token types tell the two apart."""
_WHOLE = frozenset("ernie4_5_vl_moe qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker".split())
"""Types whose frames stand one behind the other; others have text between them, and so a run of placeholders each."""
_IN_SPANS = frozenset({"glm5_next"})
"""Types whose videos have the placeholders of images, between a token that begins a video and one that ends it."""


def as_videos(model: PreTrainedModel, document: Document) -> Document:
    """The document with videos in place of its images: of one frame, or of two where their placeholders are one run."""
    config: Any = model.config
    if images.form_of(model) not in ("tiles", "square") and config.model_type not in _WHOLE | _IN_SPANS:
        return _in_place(model, document)
    before = document.tokens["input_ids"][0].tolist()
    videos = tuple(_video(model, picture) for picture in document.images)
    counts = iter(_features(model, video) for video in videos)
    ids: list[int] = []
    types: list[int] = []
    for place, token in enumerate(before):
        if token != config.image_token_id:
            ids, types = [*ids, token], [*types, 0]
        elif place == 0 or before[place - 1] != token:
            count = next(counts)
            run = [config.video_token_id] * count
            if config.model_type in _IN_SPANS:
                run = [config.video_start_token_id, *[token] * count, config.video_end_token_id]
            ids, types = ids + run, types + [2 * (each in (token, config.video_token_id)) for each in run]
    tokens = {"input_ids": torch.tensor([ids])}
    for name in document.tokens:
        if name != "input_ids":
            assert name in ("mm_token_type_ids", "token_type_ids"), name
            tokens[name] = torch.tensor([types])
    return Document(tokens, videos)


def _in_place(model: PreTrainedModel, document: Document) -> Document:
    """The same, where a video of one frame has as many placeholders as an image."""
    config: Any = model.config
    tokens = {name: value.clone() for name, value in document.tokens.items()}
    places = tokens["input_ids"] == config.image_token_id
    if config.model_type not in _AS_IMAGES:
        tokens["input_ids"][places] = config.video_token_id
    if "mm_token_type_ids" in tokens:
        tokens["mm_token_type_ids"][places] = 2
    return Document(tokens, tuple(_video(model, picture) for picture in document.images))


def _video(model: PreTrainedModel, picture: dict[str, Any]) -> dict[str, Any]:
    config: Any = model.config
    pixels = picture["pixel_values"]
    if images.form_of(model) in ("tiles", "square"):
        frames = pixels[:, :4] if pixels.ndim == 5 else torch.stack([pixels, -pixels], dim=1)
        return {"pixel_values_videos": frames}
    found = {_OF_FRAMES[name]: value for name, value in picture.items()}
    if config.model_type in _WHOLE:
        found["pixel_values_videos"] = torch.cat([pixels, -pixels])
        found["video_grid_thw"] = found["video_grid_thw"] * torch.tensor([2, 1, 1])
    named = inspect.signature(type(model).forward).parameters
    if "video_second_per_grid" in named:
        found["video_second_per_grid"] = torch.tensor([1.0 + len(pixels) % 3])
    if "num_frames_per_video" in named:
        found["num_frames_per_video"] = torch.tensor([1])
    return found


def _features(model: Any, video: dict[str, Any]) -> int:
    """How many features a video has, as the model says."""
    holder: Any = next(m for m in (getattr(model, "model", None), model) if hasattr(m, "get_video_features"))
    named = inspect.signature(holder.get_video_features).parameters
    config = model.config
    layers = {
        name: getattr(config, name) for name in named if name.startswith("vision_feature") and hasattr(config, name)
    }
    with torch.no_grad():
        found = holder.get_video_features(**{n: v for n, v in video.items() if n in named}, **layers)
    features = getattr(found, "pooler_output", found)
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.numel() // part.shape[-1] for part in parts)

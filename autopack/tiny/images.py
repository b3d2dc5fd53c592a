"""Documents with images for tiny models: tokens with placeholders, and the pixels in the form that
the type takes.

    first = images.document(model, [3, images.IMAGE, 4])
    second = images.document(model, [images.IMAGE, 5], seed=1)
    model(**media_rows.row(model, [first, second]))

The number of placeholders of an image comes from the model's own `get_image_features`. Types that
take both can be given videos in the place of images.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.registry import families
from autopack.tiny import rules
from autopack.tiny.media_rows import NUMBERS, SEEN, Document, features_of, form_of, runs
from autopack.tiny.models import tokens

IMAGE = "image"
"""Marker of an image among the lengths of runs of text."""
_FRAMES = "frames and instructions"
_BESIDE = "square beside text"
_SIDE = 2
"""Number of patches that are merged, in each direction."""


def needs_images(model: PreTrainedModel) -> bool:
    """Return True if every document of this type has an image.

    Transformers cannot run a document of such a type without one, or no token tells it from others.
    """
    return form_of(model) == _BESIDE or any(
        model.config.model_type in family.tiny.needs_images for family in families()
    )


def document(model: PreTrainedModel, parts: Sequence[int | str], *, seed: int = 0) -> Document:
    """Make a document of runs of text of the given lengths in tokens, and images.

    The seed determines all that is random: tokens, and pixels with values of order one.
    """
    generator = torch.Generator().manual_seed(seed)
    config, form = model.config, form_of(model) or ""
    pictures: list[dict[str, Any]] = []
    if form == _BESIDE:
        pictures, parts = (
            [_picture(model, seed, generator)],
            [part for part in parts if isinstance(part, int)],
        )

    def add() -> int:
        pictures.append(_picture(model, len(pictures) + seed, generator))
        return _placeholders(model, pictures[-1])

    decoded = {}
    if config.is_encoder_decoder:
        decoded["decoder_input_ids"] = tokens(config, 1, 3 + seed % 4, seed=seed * 100 + len(parts))
        if needs_images(model):  # its encoder takes no tokens, and one image
            return Document(decoded, (_picture(model, seed, generator),))
    fields = ("image_token_id", "image_token_index", "video_token_index" if form == _FRAMES else "")
    ids_of_placeholders = (getattr(config, name, None) for name in fields)
    placeholder = next(
        (value for value in ids_of_placeholders if isinstance(value, int)), rules.VOCAB - 1
    )
    around = [("vision_start_token_id", "vision_end_token_id"), ("image_start_id", "image_end_id")]
    found = list(runs(config, parts, seed, placeholder, around, add))
    whole = torch.cat(found, dim=1)
    named = inspect.signature(type(model).forward).parameters
    names = [
        name
        for name in ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
        if name in named
    ]
    per_token = {"input_ids": whole, **{name: (whole == placeholder).long() for name in names}}
    if "token_type_ids" in named and form == "square after a prefix":
        per_token["token_type_ids"] = (
            torch.arange(whole.shape[1]) >= whole.shape[1] - found[-1].shape[1]
        ).long()[None]
    return Document(
        {**per_token, **decoded}, tuple(pictures), _seen(form, whole[0] == placeholder, pictures)
    )


def _seen(
    form: str, places: torch.Tensor, pictures: Sequence[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Return a mask as processors write it: a token sees the last image before it."""
    if form not in SEEN or not pictures:
        return {}
    number = places.long().cumsum(0)[:, None] - 1
    seen = (number == torch.arange(len(pictures)))[None].long()
    if "aspect_ratio_mask" in pictures[0]:
        seen = (
            seen[..., None]
            * torch.cat([picture["aspect_ratio_mask"] for picture in pictures], dim=1)[:, None]
        )
    return {SEEN[form]: seen}


def _placeholders(model: PreTrainedModel, picture: dict[str, Any]) -> int:
    """Return the number of placeholder tokens of a picture."""
    if form_of(model) in SEEN:  # it marks the place
        return 1
    if hasattr(model.config, "latent_query_num"):  # Kosmos
        return int(model.config.latent_query_num)
    return features_of(model, "video" if form_of(model) == _FRAMES else "image", picture)[1]


def _picture(model: PreTrainedModel, number: int, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments of one image; images of different numbers differ in size if the type
    allows."""
    form, vision, odd = form_of(model), _vision(model), number % 2
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    channels = next(
        (
            getattr(vision, n)
            for n in ("in_channels", "in_chans", "num_channels")
            if hasattr(vision, n)
        ),
        3,
    )
    size = getattr(getattr(vision, "sam_config", vision), "image_size", None)
    size = size if isinstance(size, int) else rules.FIELDS["image_size"]
    patch = getattr(vision, "patch_size", rules.FIELDS["patch_size"])
    many = 1 + odd

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def square(*shape: int) -> torch.Tensor:
        return pixels(*shape, channels, size, size)

    def flat(*shape: int) -> torch.Tensor:
        return pixels(*shape, channels * patch**2)

    def one(*values: int) -> torch.Tensor:
        return torch.tensor([values])

    match form:
        case "grid" | "grid of squares":
            # grid: (patches, channels * pixels), and the grid of each image
            # grid of squares: as grid, (patches, channels, height, width)
            merge = _merge(vision)
            depth = (
                getattr(vision, "temporal_patch_size", None)
                or getattr(vision, "patch_temporal", None)
                or 1
            )
            of_patch = (
                (channels * depth * patch**2,) if form == "grid" else (channels, patch, patch)
            )
            found: dict[str, Any] = {"pixel_values": pixels(2 * merge**2 * many, *of_patch)}
            found["image_grid_thw"] = one(1, merge * many, 2 * merge)
            merged = "image_merge_sizes" in inspect.signature(type(model).forward).parameters
            return {**found, "image_merge_sizes": torch.tensor([merge])} if merged else found
        case "grid of one frame":
            # as grid, where a grid has no time
            return {"pixel_values": flat(8 * many), "image_grid_hw": one(2 * many, 4)}
        case "grid of tokens":
            # (tokens, height, width, channels), and the grid of each image
            side = patch * _merge(vision)
            return {
                "pixel_values": pixels(2 * many, side, side, channels),
                "image_grid_thw": one(1, many, 2),
            }
        case "patches in time":
            # (patches, times, height, width, channels)
            return {
                "pixel_values": pixels(1 + many, vision.temporal_patch_size, patch, patch, channels)
            }
        case "row of patches":
            # (1, channels, height, patches * width), and the size of each image in patches
            high, wide = 2 * _SIDE, 2 * _SIDE * many
            return {
                "pixel_values": pixels(1, channels, patch, high * wide * patch),
                "target_sizes": one(high, wide),
            }
        case "square" | "square after a prefix" | "square beside text":
            # square: (images, channels, height, width) square after a prefix: as square; token
            # types tell the last run of text, which is learned square beside text: as square, one
            # for each document, whose tokens have no places for it
            return {"pixel_values": square(1)}
        case "square and instructions" | "frames and instructions":
            # square and instructions: as square, and tokens for each image, with a mask of padding
            # frames and instructions: the same, of (videos, frames, channels, height, width)
            frames = square(1, 2) if form == _FRAMES else square(1)
            ids = torch.randint(
                rules.ORDINARY.start, rules.ORDINARY.stop, (1, 4), generator=generator
            )
            mask = (torch.arange(4) < 2 + many).long()[None]
            return {
                "pixel_values": frames,
                "qformer_input_ids": ids,
                "qformer_attention_mask": mask,
            }
        case "square and crops" | "views":
            # square and crops: as square, the crops of all images, and how many each image has
            # views: (images, channels, height, width), and smaller views of each, one after the
            # other
            of_local = size if form == "square and crops" else size // 2
            found = {
                "pixel_values": square(1),
                "pixel_values_local": pixels(many, channels, of_local, of_local),
            }
            return {**found, "num_local_patches": torch.tensor([many])}
        case "square and grids of crops":
            # as square and crops, in lists, and how many crops lie side by side and below each
            # other
            found = {"pixel_values": square(1), "pixel_values_local": square(2 * many)}
            return {**found, "num_local_patches": [2 * many], "patches_grid": [[many, 2]]}
        case "two resolutions":
            # as square, and the same image at a higher resolution
            fine = model.config.high_res_vision_config.image_size
            return {
                "pixel_values": square(1),
                "high_res_pixel_values": pixels(1, channels, fine, fine),
            }
        case "sized":
            # (images, channels, height, width), padded, and the size of each image
            image, width = square(1), size if odd else size // 2
            image[..., width:] = 0
            return {"pixel_values": image, "image_sizes": one(size, width)}
        case "tiles":
            # (images, tiles, channels, height, width), and the size of each image
            return {"pixel_values": square(1, 5), "image_sizes": one(size * (2 - odd), 2 * size)}
        case "tiles alone":
            # as tiles, without the size, equally many of every image
            return {"pixel_values": square(1, 2)}
        case "tiles by row":
            # (rows, images, tiles, channels, height, width), and which tiles each token sees
            tiles = square(1, 1, vision.max_num_tiles)
            tiles[:, :, many:] = 0
            mask = (torch.arange(vision.max_num_tiles) < many).long()[None, None]
            return {"pixel_values": tiles, "aspect_ratio_ids": one(many), "aspect_ratio_mask": mask}
        case "nested" | "nested, seen":
            # nested: (rows, images, channels, height, width)
            # nested, seen: the same, and which images each token sees
            return {"pixel_values": square(1, 1)}
        case "nested, masked":
            # as nested, and which images a row has
            return {
                "pixel_values": square(1, 1),
                "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
            }
        case "flat patches":
            # (1, patches, channels * pixels), of all images
            return {"pixel_values": flat(1, 1 + many)}
        case "flattened patches" | "flattened patches, masked":
            # flattened patches: (images, patches, row and column and channels * pixels); a mask
            # tells the placeholders flattened patches, masked: the same, and which patches are none
            # of padding
            high, wide, of_patch = _SIDE, _SIDE + odd, vision.patch_embed_hidden_size
            # zeros are padding
            patches = torch.zeros(1, _SIDE * (_SIDE + 1), 2 + of_patch, dtype=dtype)
            where = 1 + torch.cartesian_prod(torch.arange(high), torch.arange(wide))
            patches[:, : high * wide] = torch.cat(
                [where[None], pixels(1, high * wide, of_patch)], dim=2
            )
            more = (
                {}
                if form == "flattened patches"
                else {"attention_mask": (patches.sum(dim=-1) != 0).long()}
            )
            return {"flattened_patches": patches, **more}
        case "numbered patches":
            # (crops, patches, channels * pixels), and which of all are pooled for each placeholder
            crops, (high, wide) = 1 + many, (side // patch for side in vision.image_size)
            windows = (
                torch.arange(high * wide)
                .reshape(high // 2, 2, wide // 2, 2)
                .transpose(1, 2)
                .reshape(-1, 4)
            )
            numbers = torch.cat([windows + high * wide * crop for crop in range(crops)])
            numbers[-1, -1] = -1  # padding
            grids = one(high // 2, wide // 2, high // 2 * (crops - 1), wide // 2)
            found = {
                "pixel_values": flat(crops, high * wide),
                NUMBERS: numbers,
                "image_grids": grids,
            }
            return {**found, "image_num_crops": torch.tensor([crops])}
        case "spatial patches":
            # (images, patches, channels * pixels), which are none of padding, and how many lie side
            # by side
            high, wide, most = 2 * _SIDE, _SIDE * many, 4 * _SIDE**2
            mask = (torch.arange(most) < high * wide).long()[None]
            return {
                "pixel_values": flat(1, most),
                "spatial_shapes": one(high, wide),
                "pixel_attention_mask": mask,
            }
    assert form == "patches"  # (images, patches, channels * pixels), and where each patch lies
    patch = getattr(vision, "model_patch_size", patch)
    side = 2 * getattr(vision, "pooling_kernel_size", 1)
    where = torch.stack(
        torch.meshgrid(
            torch.arange(side),
            torch.arange(side),
            indexing="xy",
        ),
        dim=-1,
    ).reshape(1, -1, 2)
    return {"pixel_values": flat(1, side**2), "image_position_ids": where}


def _merge(vision: Any) -> int:
    """Return how many patches on a side become one token."""
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size")
    found = next((getattr(vision, name) for name in names if getattr(vision, name, None)), 2)
    return int(found if isinstance(found, int) else found[0])


def _vision(model: PreTrainedModel) -> Any:
    """Return the configuration of the part that reads images."""
    whole = getattr(model.config, "encoder", model.config)
    parts = (getattr(whole, name, None) for name in ("vision_config", "vq_config"))
    return next((part for part in parts if part is not None), model.config)


_OF_FRAMES = {
    "pixel_values": "pixel_values_videos",
    "image_grid_thw": "video_grid_thw",
    "image_merge_sizes": "video_merge_sizes",
    "target_sizes": "target_sizes_videos",
    "image_position_ids": "video_position_ids",
}
_AS_IMAGES = frozenset("glm46v glm4v glm4v_moe glm_ocr glmga".split())
"""Types whose videos have the placeholders of images; token types tell the two apart."""
_WHOLE = frozenset(
    "ernie4_5_vl_moe qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker".split()
)
"""Types whose frames stand one behind the other; others have text between frames, and a run of
placeholders for each."""
_IN_SPANS = frozenset({"glm5_next"})
"""Types whose videos have the placeholders of images, between a token that begins a video and one
that ends it."""


def as_videos(model: PreTrainedModel, document: Document) -> Document:
    """Return the document with videos in place of its images.

    They have one frame, or two if the placeholders of all frames are one run.
    """
    config: Any = model.config
    before = document.tokens["input_ids"][0].tolist()
    videos = tuple(_video(model, picture) for picture in document.images)
    has_frames = hasattr(getattr(model, "model", model), "get_video_features")
    medium, media = ("video", videos) if has_frames else ("image", document.images)
    counts = iter(features_of(model, medium, each)[1] for each in media)
    image, in_spans = config.image_token_id, config.model_type in _IN_SPANS
    video = image if in_spans or config.model_type in _AS_IMAGES else config.video_token_id
    ids: list[int] = []
    for place, token in enumerate(before):
        if token != image:
            ids.append(token)
        elif place == 0 or before[place - 1] != token:
            run = [video] * next(counts)
            ids += (
                [config.video_start_token_id, *run, config.video_end_token_id] if in_spans else run
            )
    whole = torch.tensor([ids])
    types = {name: 2 * (whole == video).long() for name in document.tokens if name != "input_ids"}
    assert types.keys() <= {"mm_token_type_ids", "token_type_ids"}, types.keys()
    return Document({"input_ids": whole, **types}, videos)


def _video(model: PreTrainedModel, picture: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for a video, made of a picture's."""
    config: Any = model.config
    pixels = picture["pixel_values"]
    if form_of(model) in ("tiles", "square"):
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

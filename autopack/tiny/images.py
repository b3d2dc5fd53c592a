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
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.registry import families
from autopack.tiny import rules
from autopack.tiny.media_rows import (
    NUMBERS,
    SEEN,
    Arguments,
    Document,
    features_of,
    form_of,
    made_of,
    tokens_of_parts,
)
from autopack.tiny.models import tokens

IMAGE = "image"
"""Marker of an image among the lengths of runs of text."""
_FRAMES = "frames and instructions"
_BESIDE = "square beside text"


def needs_images(model: PreTrainedModel) -> bool:
    """Return True if every document of this type has an image.

    Transformers cannot run a document of such a type without one, or no token tells it from others.
    """
    return form_of(model) == _BESIDE or any(
        model.config.model_type in family.tiny.needs_images for family in families()
    )


def document(model: PreTrainedModel, parts: Sequence[int | str], *, seed: int = 0) -> Document:
    """Return a document of `parts`: runs of text, by their lengths in tokens, and images.

    The seed determines all that is random: tokens, and pixels with values of order one.
    """
    generator = torch.Generator().manual_seed(seed)
    config, form = model.config, form_of(model) or ""
    pictures: list[Arguments] = []
    if form == _BESIDE:
        pictures, parts = (
            [_picture(model, seed, generator)],
            [part for part in parts if isinstance(part, int)],
        )

    def add_picture() -> int:
        pictures.append(_picture(model, len(pictures) + seed, generator))
        return _placeholders(model, pictures[-1])

    decoded = {}
    if config.is_encoder_decoder:
        decoded["decoder_input_ids"] = tokens(config, 1, 3 + seed % 4, seed=seed * 100 + len(parts))
        if needs_images(model):  # its encoder takes no tokens, and one image
            return Document(decoded, (_picture(model, seed, generator),))
    fields = f"image_token_id image_token_index{' video_token_index' if form == _FRAMES else ''}"
    around = "vision_start_token_id vision_end_token_id", "image_start_id image_end_id"
    kinds = dict.fromkeys("mm_token_type_ids token_type_ids image_embeds_position_mask".split(), 1)
    per_token, places = tokens_of_parts(model, parts, seed, fields, around, kinds, add_picture)
    if "token_type_ids" in per_token and form == "square after a prefix":
        per_token["token_type_ids"] = (places.flip(1).cumsum(1) == 0).flip(1).long()
    return Document({**per_token, **decoded}, tuple(pictures), _seen(form, places[0], pictures))


def _seen(
    form: str, places: torch.Tensor, pictures: Sequence[Arguments]
) -> dict[str, torch.Tensor]:
    """Return {argument: mask} in which a token sees the last image before it; {} for most forms."""
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


def _placeholders(model: PreTrainedModel, picture: Arguments) -> int:
    """Return the number of placeholder tokens of a picture."""
    if form_of(model) in SEEN:  # it marks the place
        return 1
    if hasattr(model.config, "latent_query_num"):  # Kosmos
        return int(model.config.latent_query_num)
    return features_of(model, "video" if form_of(model) == _FRAMES else "image", picture)[1]


_FORMS = """
grid | pixel_values drawn 2*merge*merge*many channels*times*patch*patch
grid | image_grid_thw row 1 merge*many 2*merge | image_merge_sizes numbers merge
grid of squares | pixel_values drawn 2*merge*merge*many channels patch patch
grid of squares | image_grid_thw row 1 merge*many 2*merge
grid of one frame | pixel_values drawn 8*many channels*patch*patch | image_grid_hw row 2*many 4
grid of tokens | pixel_values drawn 2*many merge*patch merge*patch channels
grid of tokens | image_grid_thw row 1 many 2
patches in time | pixel_values drawn more times patch patch channels
row of patches | pixel_values drawn 1 channels patch 16*many*patch | target_sizes row 4 4*many
square | pixel_values drawn 1 channels size size
square after a prefix | pixel_values drawn 1 channels size size
square beside text | pixel_values drawn 1 channels size size
square and instructions | pixel_values drawn 1 channels size size
square and instructions | qformer_input_ids tokens 1 4 | qformer_attention_mask mask 1 4<words
frames and instructions | pixel_values drawn 1 2 channels size size
frames and instructions | qformer_input_ids tokens 1 4 | qformer_attention_mask mask 1 4<words
square and crops | pixel_values drawn 1 channels size size
square and crops | pixel_values_local drawn many channels size size | num_local_patches numbers many
views | pixel_values drawn 1 channels size size
views | pixel_values_local drawn many channels half half | num_local_patches numbers many
square and grids of crops | pixel_values drawn 1 channels size size
square and grids of crops | pixel_values_local drawn 2*many channels size size
square and grids of crops | num_local_patches list 2*many | patches_grid lists many 2
two resolutions | pixel_values drawn 1 channels size size
two resolutions | high_res_pixel_values drawn 1 channels fine fine
sized | pixel_values drawn 1 channels size size<width | image_sizes row size width
tiles | pixel_values drawn 1 5 channels size size | image_sizes row tall 2*size
tiles alone | pixel_values drawn 1 2 channels size size
tiles by row | pixel_values drawn 1 1 tiles<many channels size size
tiles by row | aspect_ratio_ids row many | aspect_ratio_mask mask 1 1 tiles<many
nested | pixel_values drawn 1 1 channels size size
nested, seen | pixel_values drawn 1 1 channels size size
nested, masked | pixel_values drawn 1 1 channels size size | pixel_attention_mask boolean 1 1
flat patches | pixel_values drawn 1 more channels*patch*patch
flattened patches | flattened_patches drawn 1 6 of_patch
flattened patches, masked | flattened_patches drawn 1 6 of_patch | attention_mask mask 1 6<2*more
numbered patches | pixel_values drawn more high*wide channels*patch*patch
numbered patches | image_grids row rows columns rows*many columns | image_num_crops numbers more
spatial patches | pixel_values drawn 1 16 channels*patch*patch
spatial patches | spatial_shapes row 4 2*many | pixel_attention_mask mask 1 16<8*many
patches | pixel_values drawn 1 side*side channels*patch*patch
"""
"""The arguments of one image, by the form; see `made_of`. The sizes are in `_picture`."""


def _picture(model: PreTrainedModel, number: int, generator: torch.Generator) -> Arguments:
    """Return one image's arguments; sizes differ by odd or even `number` if the type allows it."""
    form, odd = form_of(model), number % 2
    whole = getattr(model.config, "encoder", model.config)
    parts = (getattr(whole, name, None) for name in ("vision_config", "vq_config"))
    vision: Any = next((part for part in parts if part is not None), model.config)

    def of_vision(*names: str, default: int = 1) -> Any:
        return next((v for name in names if (v := getattr(vision, name, None))), default)

    size = getattr(getattr(vision, "sam_config", vision), "image_size", None)
    size = size if isinstance(size, int) else rules.FIELDS["image_size"]
    patch = of_vision("patch_size", default=rules.FIELDS["patch_size"])
    merge = of_vision("spatial_merge_size", "merge_size", "merge_kernel_size", default=2)
    sizes = {
        "many": 1 + odd,
        "more": 2 + odd,
        "words": 3 + odd,
        "channels": of_vision("in_channels", "in_chans", "num_channels", default=3),
        "size": size,
        "half": size // 2,
        "width": size if odd else size // 2,
        "tall": size * (2 - odd),
        "fine": getattr(getattr(model.config, "high_res_vision_config", None), "image_size", 1),
        "patch": of_vision("model_patch_size", default=patch) if form == "patches" else patch,
        "merge": merge if isinstance(merge, int) else merge[0],
        "times": of_vision("temporal_patch_size", "patch_temporal"),
        "tiles": of_vision("max_num_tiles"),
        "of_patch": 2 + of_vision("patch_embed_hidden_size"),
        "side": 2 * of_vision("pooling_kernel_size"),
    }
    if form == "numbered patches":
        high, wide = (side // patch for side in vision.image_size)
        sizes |= {"high": high, "wide": wide, "rows": high // 2, "columns": wide // 2}
    found = made_of(_FORMS, form, sizes, model, generator)
    pixels: Any = found.get("pixel_values")
    if "image_merge_sizes" not in inspect.signature(type(model).forward).parameters:
        found.pop("image_merge_sizes", None)
    if "flattened_patches" in found:  # begin with their row and column; zeros are padding
        where = torch.cartesian_prod(torch.arange(1, 3), torch.arange(1, 3 + odd))
        patches = found["flattened_patches"][0]
        patches[: len(where), :2], patches[len(where) :] = where, 0
    elif form == "numbered patches":  # those of all that are pooled for each placeholder
        numbers = torch.arange(pixels.shape[:2].numel()).reshape(-1, high // 2, 2, wide // 2, 2)
        found[NUMBERS] = numbers.transpose(2, 3).reshape(-1, 4)
        found[NUMBERS][-1, -1] = -1  # padding
    elif form == "patches":
        across = torch.arange(sizes["side"])
        found["image_position_ids"] = torch.cartesian_prod(across, across).flip(-1)[None]
    return found


_AS_IMAGES = frozenset("glm46v glm4v glm4v_moe glm_ocr glmga".split())
"""Types whose videos have the placeholders of images; token types tell the two apart."""
_WHOLE = frozenset(
    "ernie4_5_vl_moe qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker".split()
)
"""Types whose frames stand one behind the other; others have text between frames, and a run of
placeholders for each."""


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
    # Its placeholders stand between a token that begins a video and one that ends it.
    image, in_spans = config.image_token_id, config.model_type == "glm5_next"
    video = image if in_spans or config.model_type in _AS_IMAGES else config.video_token_id
    ids: list[int] = []
    for token, same in groupby(before):
        run = [*same]
        if token == image:
            run = [video] * next(counts)
            if in_spans:
                run = [config.video_start_token_id, *run, config.video_end_token_id]
        ids += run
    whole = torch.tensor([ids])
    types = {name: 2 * (whole == video).long() for name in document.tokens if name != "input_ids"}
    assert types.keys() <= {"mm_token_type_ids", "token_type_ids"}, types.keys()
    return Document({"input_ids": whole, **types}, videos)


def _video(model: PreTrainedModel, picture: Arguments) -> Arguments:
    """Return the arguments of a video made of a picture's arguments."""
    config: Any = model.config
    pixels = picture["pixel_values"]
    if form_of(model) in ("tiles", "square"):
        frames = pixels[:, :4] if pixels.ndim == 5 else torch.stack([pixels, -pixels], dim=1)
        return {"pixel_values_videos": frames}
    found = {
        name.replace("image", "video") if "image" in name else f"{name}_videos": value
        for name, value in picture.items()
    }
    if config.model_type in _WHOLE:
        found["pixel_values_videos"] = torch.cat([pixels, -pixels])
        found["video_grid_thw"] = found["video_grid_thw"] * torch.tensor([2, 1, 1])
    named = inspect.signature(type(model).forward).parameters
    if "video_second_per_grid" in named:
        found["video_second_per_grid"] = torch.tensor([1.0 + len(pixels) % 3])
    if "num_frames_per_video" in named:
        found["num_frames_per_video"] = torch.tensor([1])
    return found

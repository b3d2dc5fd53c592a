"""Documents with images for tiny models: tokens with placeholders, and the pixels in the form that the type takes.

    first = images.document(model, [3, images.IMAGE, 4])
    second = images.document(model, [images.IMAGE, 5], seed=1)
    model(**images.row(model, [first, second]))

How many placeholders an image has is not computed here: the model's own `get_image_features` is asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.registry import families
from autopack.tiny import rules
from autopack.tiny.models import tokens

IMAGE = "image"
"""Stands for an image among the lengths of runs of text."""

FORMS = {
    "grid": "(patches, channels * pixels), and the grid of each image",
    "grid of one frame": "the same, where a grid has no time",
    "grid of squares": "the same, (patches, channels, height, width)",
    "grid of tokens": "(tokens, height, width, channels), and the grid of each image",
    "patches in time": "(patches, times, height, width, channels)",
    "row of patches": "(1, channels, height, patches * width), and the size of each image in patches",
    "square": "(images, channels, height, width)",
    "square beside text": "the same, one for each document, whose tokens have no places for it",
    "square and instructions": "the same, and tokens for each image, with a mask of padding",
    "frames and instructions": "the same of (videos, frames, channels, height, width)",
    "square after a prefix": "the same as square; token types tell the last run of text, which is learned",
    "two resolutions": "the same, and the same image at a higher resolution",
    "square and crops": "the same as square, the crops of all images, and how many each image has",
    "square and grids of crops": "the same, in lists, and how many crops lie side by side and below each other",
    "sized": "(images, channels, height, width), padded, and the size of each image",
    "tiles": "(images, tiles, channels, height, width), and the size of each image",
    "tiles alone": "the same without the size, equally many of every image",
    "views": "(images, channels, height, width), and smaller views of each, one after the other",
    "nested": "(rows, images, channels, height, width)",
    "nested, masked": "the same, and which images a row has",
    "nested, seen": "the same, and which images each token sees",
    "tiles by row": "(rows, images, tiles, channels, height, width), and which tiles each token sees",
    "patches": "(images, patches, channels * pixels), and where each patch lies",
    "flat patches": "(1, patches, channels * pixels), of all images",
    "flattened patches": "(images, patches, row and column and channels * pixels); a mask tells the placeholders",
    "flattened patches, masked": "the same, and which patches are none of padding",
    "numbered patches": "(crops, patches, channels * pixels), and which of all are pooled for each placeholder",
    "spatial patches": "the same, and how many patches lie side by side",
}
"""The forms in which types take images; the families say which type takes which (`autopack.family.Tiny.images`)."""
_ALONG = {"row of patches": -1, "flat patches": 1}
"""The dimension along which pixels of several images are joined, where it is not the first."""
_NUMBERS = "image_token_pooling"
_SEEN = {"nested, seen": "image_attention_mask", "tiles by row": "cross_attention_mask"}
"""Forms of types whose text attends to images across, and the argument that says which token sees which."""
_FRAMES = "frames and instructions"
_BESIDE = "square beside text"
_SIZE = rules.FIELDS["image_size"]
_PATCH = rules.FIELDS["patch_size"]
_SIDE = 2
"""Patches that are merged, in each direction."""


@dataclass(frozen=True)
class Document:
    """One document: what it has for every token, (1, tokens), and the arguments of each of its images.

    Its length is that of what the model predicts: of an encoder-decoder, the decoder's tokens.
    """

    tokens: dict[str, torch.Tensor]
    images: tuple[dict[str, Any], ...]
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    """Which of its images each token sees, (1, tokens, images, ...), where text attends to them across."""

    def __len__(self) -> int:
        return self.predicted.shape[1]

    @property
    def predicted(self) -> torch.Tensor:
        """The tokens that the model predicts, (1, tokens)."""
        return self.tokens["decoder_input_ids" if "decoder_input_ids" in self.tokens else "input_ids"]


def form_of(model: PreTrainedModel) -> str | None:
    """In which of `FORMS` the type takes images, or None where no family knows, and no documents can be made."""
    forms = ((form, types) for family in families() for form, types in family.tiny.images.items())
    return next((form for form, types in forms if model.config.model_type in types), None)


def needs_images(model: PreTrainedModel) -> bool:
    """Whether every document of this type has an image: transformers cannot run one that has none, or nothing in its
    tokens tells it from the others."""
    return form_of(model) == _BESIDE or any(
        model.config.model_type in family.tiny.needs_images for family in families()
    )


def document(model: PreTrainedModel, parts: Sequence[int | str], *, seed: int = 0) -> Document:
    """Make a document of runs of text of the given lengths in tokens, and images.

    All that is random follows from the seed: tokens, and pixels with values of order one.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if config.is_encoder_decoder and needs_images(model):  # its encoder takes no tokens, and one image
        tokens_of_decoder = tokens(config, 1, 3 + seed % 4, seed=seed * 100 + len(parts))
        return Document({"decoder_input_ids": tokens_of_decoder}, (_picture(model, seed, generator),))
    found: list[torch.Tensor] = []
    pictures: list[dict[str, Any]] = []
    fields = ("image_token_id", "image_token_index", "video_token_index" if form_of(model) == _FRAMES else "")
    ids_of_placeholders = (getattr(config, name, None) for name in fields)
    placeholder = next((value for value in ids_of_placeholders if isinstance(value, int)), rules.VOCAB - 1)
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids = tokens(config, 1, part, seed=seed * 100 + number)
        elif form_of(model) == _BESIDE:
            pictures = pictures or [_picture(model, seed, generator)]
            continue
        else:
            pictures.append(_picture(model, len(pictures) + seed, generator))
            ids = torch.full((1, _placeholders(model, pictures[-1])), placeholder)
            for name in ("vision_{}_token_id", "image_{}_id"):
                start, end = (getattr(config, name.format(side), None) for side in ("start", "end"))
                if isinstance(start, int) and isinstance(end, int):
                    ids = torch.cat([torch.tensor([[start]]), ids, torch.tensor([[end]])], dim=1)
        found.append(ids)
    whole = torch.cat(found, dim=1)
    named = inspect.signature(type(model).forward).parameters
    names = [name for name in ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask") if name in named]
    per_token = {"input_ids": whole, **{name: (whole == placeholder).long() for name in names}}
    if "token_type_ids" in named and form_of(model) == "square after a prefix":
        per_token["token_type_ids"] = (torch.arange(whole.shape[1]) >= whole.shape[1] - found[-1].shape[1]).long()[None]
    if config.is_encoder_decoder:
        per_token["decoder_input_ids"] = tokens(config, 1, 3 + seed % 4, seed=seed * 100 + len(parts))
    return Document(per_token, tuple(pictures), _seen(form_of(model) or "", whole[0] == placeholder, pictures))


def row(model: PreTrainedModel, documents: Sequence[Document]) -> dict[str, Any]:
    """The arguments of a row of these documents: without anything that says where one ends."""
    return rows(model, [documents])


def rows(model: PreTrainedModel, documents: Sequence[Sequence[Document]]) -> dict[str, Any]:
    """The arguments of several rows of documents, which must be equally long."""
    names = documents[0][0].tokens
    arguments = {
        name: torch.cat([torch.cat([d.tokens[name] for d in each], dim=1) for each in documents]) for name in names
    }
    pictures = [picture for each in documents for d in each for picture in d.images]
    if pictures:
        form = form_of(model) or ""
        for name in pictures[0]:
            if form.startswith("nested") or form in _SEEN:
                arguments[name] = _by_row(name, documents)
            else:
                along = _ALONG.get(form, 0) if name.startswith("pixel_values") else 0
                arguments[name] = _in_order(name, documents, along)
        for name in {name for each in documents for d in each for name in d.seen}:
            arguments[name] = _along_diagonal(name, documents)
        if form == "numbered patches":
            arguments[_NUMBERS] = _going_on(pictures)
    return arguments


def _going_on(pictures: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Numbers of patches over all pictures, where each picture has its own from 0."""
    counts = [picture["pixel_values"].shape[:2].numel() for picture in pictures]
    before = [sum(counts[:place]) for place in range(len(counts))]
    numbers = (picture[_NUMBERS] for picture in pictures)
    return torch.cat([torch.where(found < 0, found, found + n) for found, n in zip(numbers, before, strict=True)])


def _in_order(name: str, documents: Sequence[Sequence[Document]], along: int) -> Any:
    found: list[Any] = [picture[name] for each in documents for d in each for picture in d.images]
    if isinstance(found[0], list):
        return [*chain.from_iterable(found)]
    return torch.cat(_padded(found) if len({value.ndim for value in found}) == 1 and along == 0 else found, dim=along)


def _padded(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Values with zeros behind them, each as large as the largest but along the first dimension."""
    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    missing = ([m - size for m, size in zip(most, value.shape[1:], strict=True)] for value in values)
    pads = ([n for behind in reversed(each) for n in (0, behind)] for each in missing)
    return [torch.nn.functional.pad(value, pad) for value, pad in zip(values, pads, strict=True)]


def _by_row(name: str, documents: Sequence[Sequence[Document]]) -> torch.Tensor:
    """Images of each row, with empty ones after them where other rows have more."""
    most = max(sum(len(d.images) for d in each) for each in documents)
    found = []
    for each in documents:
        pictures = [picture[name] for d in each for picture in d.images]
        like = next(d.images[0][name] for e in documents for d in e if d.images)
        pictures += [torch.zeros_like(like)] * (most - len(pictures))
        found.append(torch.cat(pictures, dim=1))
    return torch.cat(found)


def _seen(form: str, places: torch.Tensor, pictures: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What processors write: a token sees the image before it, and those that stand together with that one."""
    if form not in _SEEN or not pictures:
        return {}
    number = places.long().cumsum(0)[:, None] - 1
    seen = (number == torch.arange(len(pictures)))[None].long()
    if "aspect_ratio_mask" in pictures[0]:
        seen = seen[..., None] * torch.cat([picture["aspect_ratio_mask"] for picture in pictures], dim=1)[:, None]
    return {_SEEN[form]: seen}


def _along_diagonal(name: str, documents: Sequence[Sequence[Document]]) -> torch.Tensor:
    most = max(sum(len(d.images) for d in each) for each in documents)
    like = next(d.seen[name] for each in documents for d in each if d.seen)
    found = like.new_zeros(len(documents), sum(map(len, documents[0])), most, *like.shape[3:])
    for row, each in enumerate(documents):
        first = images = 0
        for document in each:
            if document.seen:
                found[row, first : first + len(document), images : images + len(document.images)] = document.seen[name]
            first, images = first + len(document), images + len(document.images)
    return found


def _placeholders(model: PreTrainedModel, picture: dict[str, Any]) -> int:
    if form_of(model) in _SEEN:  # it marks the place
        return 1
    if hasattr(model.config, "latent_query_num"):  # Kosmos
        return int(model.config.latent_query_num)
    asked = "get_video_features" if form_of(model) == _FRAMES else "get_image_features"
    function = next(getattr(m, asked) for m in (getattr(model, "model", None), model) if hasattr(m, asked))
    known = inspect.signature(function).parameters
    named = known if known.keys() & picture.keys() else picture  # one of somebody's that hands all on
    with torch.no_grad():
        features = function(**{name: value for name, value in picture.items() if name in named})
    found = getattr(features, "pooler_output", None)
    found = getattr(features, "last_hidden_state", features) if found is None else found
    if getattr(features, "deepstack_features", None) is not None and found is None:
        found = features.deepstack_features[0][1]  # all that there is: features to be added in several layers
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _picture(model: PreTrainedModel, number: int, generator: torch.Generator) -> dict[str, Any]:
    """The arguments of one image; images of different numbers have different sizes where the type allows."""
    form, vision = form_of(model), _vision(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    channels = next((getattr(vision, n) for n in ("in_channels", "in_chans", "num_channels") if hasattr(vision, n)), 3)
    size = getattr(getattr(vision, "sam_config", vision), "image_size", _SIZE)
    size = size if isinstance(size, int) else _SIZE
    patch = getattr(vision, "patch_size", _PATCH)
    if form in ("grid", "grid of squares"):
        merge = _merge(model)
        height, width = merge * (1 + number % 2), merge * 2
        depth = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
        shape = (channels * depth * patch**2,) if form == "grid" else (channels, patch, patch)
        flat = pixels(height * width, *shape)
        sizes = {"image_grid_thw": torch.tensor([[1, height, width]])}
        if "image_merge_sizes" in inspect.signature(type(model).forward).parameters:
            sizes["image_merge_sizes"] = torch.tensor([merge])
        return {"pixel_values": flat, **sizes}
    if form == "grid of one frame":
        high, wide = 2 * (1 + number % 2), 4
        grid = torch.tensor([[high, wide]])
        return {"pixel_values": pixels(high * wide, channels * patch**2), "image_grid_hw": grid}
    if form == "grid of tokens":
        side, high, wide = patch * _merge(model), 1 + number % 2, 2
        return {
            "pixel_values": pixels(high * wide, side, side, channels),
            "image_grid_thw": torch.tensor([[1, high, wide]]),
        }
    if form == "patches in time":
        return {"pixel_values": pixels(2 + number % 2, vision.temporal_patch_size, patch, patch, channels)}
    if form == "row of patches":
        high, wide = 2 * _SIDE, 2 * _SIDE * (1 + number % 2)
        return {
            "pixel_values": pixels(1, channels, patch, high * wide * patch),
            "target_sizes": torch.tensor([[high, wide]]),
        }
    if form in ("square", "square after a prefix", _BESIDE):
        return {"pixel_values": pixels(1, channels, size, size)}
    if form in ("square and instructions", _FRAMES):
        frames = pixels(1, 2, channels, size, size) if form == _FRAMES else pixels(1, channels, size, size)
        ids = torch.randint(rules.ORDINARY.start, rules.ORDINARY.stop, (1, 4), generator=generator)
        mask = (torch.arange(4) < 3 + number % 2).long()[None]
        return {"pixel_values": frames, "qformer_input_ids": ids, "qformer_attention_mask": mask}
    if form == "square and crops":
        crops = 1 + number % 2
        return {
            "pixel_values": pixels(1, channels, size, size),
            "pixel_values_local": pixels(crops, channels, size, size),
            "num_local_patches": torch.tensor([crops]),
        }
    if form == "square and grids of crops":
        wide = 1 + number % 2
        return {
            "pixel_values": pixels(1, channels, size, size),
            "pixel_values_local": pixels(2 * wide, channels, size, size),
            "num_local_patches": [2 * wide],
            "patches_grid": [[wide, 2]],
        }
    if form == "two resolutions":
        fine = model.config.high_res_vision_config.image_size
        return {
            "pixel_values": pixels(1, channels, size, size),
            "high_res_pixel_values": pixels(1, channels, fine, fine),
        }
    if form == "sized":
        found = torch.tensor([[size, size if number % 2 else size // 2]])
        image = pixels(1, channels, size, size)
        image[..., int(found[0, 1]) :] = 0
        return {"pixel_values": image, "image_sizes": found}
    if form == "tiles":
        return {
            "pixel_values": pixels(1, 5, channels, size, size),
            "image_sizes": torch.tensor([[size, 2 * size] if number % 2 else [2 * size, 2 * size]]),
        }
    if form == "tiles alone":
        return {"pixel_values": pixels(1, 2, channels, size, size)}
    if form == "views":
        views = 1 + number % 2
        small = pixels(views, channels, size // 2, size // 2)
        return {
            "pixel_values": pixels(1, channels, size, size),
            "pixel_values_local": small,
            "num_local_patches": torch.tensor([views]),
        }
    if form == "tiles by row":
        shown = 1 + number % 2
        tiles = pixels(1, 1, vision.max_num_tiles, channels, size, size)
        tiles[:, :, shown:] = 0
        return {
            "pixel_values": tiles,
            "aspect_ratio_ids": torch.tensor([[shown]]),
            "aspect_ratio_mask": (torch.arange(vision.max_num_tiles) < shown).long()[None, None],
        }
    if form in ("nested", "nested, seen"):
        return {"pixel_values": pixels(1, 1, channels, size, size)}
    if form == "nested, masked":
        return {
            "pixel_values": pixels(1, 1, channels, size, size),
            "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
        }
    if form == "flat patches":
        return {"pixel_values": pixels(1, 2 + number % 2, channels * patch**2)}
    if form in ("flattened patches", "flattened patches, masked"):
        high, wide = _SIDE, _SIDE + number % 2
        # zeros are padding
        flat = torch.zeros(1, _SIDE * (_SIDE + 1), 2 + vision.patch_embed_hidden_size, dtype=dtype)
        where = 1 + torch.cartesian_prod(torch.arange(high), torch.arange(wide))
        flat[:, : high * wide] = torch.cat([where[None], pixels(1, high * wide, vision.patch_embed_hidden_size)], dim=2)
        more = {} if form == "flattened patches" else {"attention_mask": (flat.sum(dim=-1) != 0).long()}
        return {"flattened_patches": flat, **more}
    if form == "numbered patches":
        crops, (high, wide) = 2 + number % 2, (side // patch for side in vision.image_size)
        windows = torch.arange(high * wide).reshape(high // 2, 2, wide // 2, 2).transpose(1, 2).reshape(-1, 4)
        numbers = torch.cat([windows + high * wide * crop for crop in range(crops)])
        numbers[-1, -1] = -1  # padding
        return {
            "pixel_values": pixels(crops, high * wide, channels * patch**2),
            _NUMBERS: numbers,
            "image_grids": torch.tensor([[high // 2, wide // 2, high // 2 * (crops - 1), wide // 2]]),
            "image_num_crops": torch.tensor([crops]),
        }
    if form == "spatial patches":
        high, wide = 2 * _SIDE, _SIDE * (1 + number % 2)
        flat, mask = pixels(1, 4 * _SIDE**2, channels * patch**2), torch.zeros(1, 4 * _SIDE**2, dtype=torch.long)
        mask[:, : high * wide] = 1
        return {"pixel_values": flat, "spatial_shapes": torch.tensor([[high, wide]]), "pixel_attention_mask": mask}
    assert form == "patches"
    patch = getattr(vision, "model_patch_size", patch)
    side = 2 * getattr(vision, "pooling_kernel_size", 1)
    where = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), dim=-1).reshape(1, -1, 2)
    return {"pixel_values": pixels(1, side**2, channels * patch**2), "image_position_ids": where}


def _merge(model: PreTrainedModel) -> int:
    vision = _vision(model)
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size")
    found = next((getattr(vision, name) for name in names if getattr(vision, name, None)), 2)
    return int(found if isinstance(found, int) else found[0])


def _vision(model: PreTrainedModel) -> Any:
    """The configuration of what reads the images."""
    whole = getattr(model.config, "encoder", model.config)
    parts = (getattr(whole, name, None) for name in ("vision_config", "vq_config"))
    return next((part for part in parts if part is not None), model.config)

"""Images of documents on their way into packed rows, as pictures or as a processor's tensors.

The order of both ties an image to its document (docs/media.md): media of a batch lie in the
order of its documents, row by row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from autopack.inspection.media import PICTURES, holds_media
from autopack.packing.checks import invalid, unusable

BYTES = ("uint8", "torch.uint8")


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the items of nested lists, with arrays of more than three axes taken apart, too.

    None and empty arrays are left out.
    """
    is_array = hasattr(value, "ndim")
    if isinstance(value, (list, tuple)) or (is_array and (value.ndim > 3 or value.dtype == object)):
        for part in value:
            yield from _leaves(part)
    elif value is not None and not (
        is_array and 0 in value.shape
    ):  # as datasets formats an empty list
        yield value


def has_pictures(name: str, values: Any) -> bool:
    """Return True if one of the values of a column or key with this name is a picture.

    It is an image of PIL, or the dict of one that datasets has not decoded. An array is one if its
    name says so, as datasets formats pictures for numpy and torch.
    """
    named, pillow = name in PICTURES, sys.modules.get("PIL.Image")
    return any(
        (isinstance(each, Mapping) and {*each} == {"bytes", "path"})
        or isinstance(each, getattr(pillow, "Image", ()))
        or (named and getattr(each, "ndim", 0) == 3 and str(each.dtype) in BYTES)
        for each in _leaves(values)
    )


def take_pictures(given: dict[str, Any], reads: bool) -> list[Any]:
    """Remove pictures from an example's values and return them; raise for any unless `reads`."""
    found: list[Any] = []
    for name in PICTURES:
        if name in given and (reads or has_pictures(name, given[name])):
            if not reads:
                raise unusable(
                    f"{name!r}: found pictures, and nothing that makes pixels of them; pass "
                    "image_processor=processor, or name it in drop_keys"
                )
            found += _leaves(given.pop(name))
    return found


def is_media(name: str, values: np.ndarray, tokens: int) -> bool:
    """Return True if a key's values are media, and not one value per token."""
    return holds_media(name) and values.ndim > 0 and not values.size == tokens == max(values.shape)


SEEN = ("image_attention_mask", "cross_attention_mask")
"""Masks of the images that each token of a document sees, (1, tokens, images, ...)."""
_IDS = "aspect_ratio_ids"
"""Values below 1 mark images that only fill up a row (Mllama)."""


def seen_per_token(name: str, values: np.ndarray, tokens: int) -> np.ndarray:
    """Return an example's mask of `SEEN` as (tokens, images, ...); raise for another shape."""
    if values.ndim < 3 or values.shape[:2] != (1, tokens):
        raise unusable(
            f"{name!r}: found shape {values.shape} for {tokens} tokens; wanted (1, tokens, images, "
            "...), as processors give it"
        )
    return values[0]


def spread_masks(
    examples: Sequence[dict[str, Any]], columns: Sequence[np.ndarray], width: int
) -> None:
    """Replace the examples' masks of `SEEN`, in place, by masks over rows, (1, images, width, ...).

    `columns` are the columns of each example's tokens in its row. Images that no token sees are
    removed, so that a row has only the images that its documents see, unless no example has any
    other.
    """
    for name in SEEN:
        masks = {number: media.pop(name) for number, media in enumerate(examples) if name in media}
        kept = {number: _needed_images(mask, examples[number]) for number, mask in masks.items()}
        is_seen = any(each.any() for each in kept.values())
        for number, mask in masks.items():
            if is_seen:
                mask = mask[:, kept[number]]
                _keep_images(examples[number], kept[number])
            spread = np.zeros((1, mask.shape[1], width, *mask.shape[2:]), np.int64)
            spread[0][:, columns[number]] = mask.swapaxes(0, 1)
            examples[number][name] = spread


def _needed_images(mask: np.ndarray, media: Mapping[str, Any]) -> np.ndarray:
    """Return a mask, (images,), of the images that a token sees or that do not only fill a row."""
    seen = np.asarray(mask.reshape(*mask.shape[:2], -1).any(axis=(0, 2)))
    return seen | (media[_IDS][0] > 0) if _IDS in media else seen


def _keep_images(media: dict[str, Any], keep: np.ndarray) -> None:
    """Remove images where `keep`, (images,) bool, is False from an example's media, in place."""
    for name, values in list(media.items()):
        if values.shape[:2] != (1, len(keep)):
            continue
        if keep.any():
            media[name] = values[:, keep]
        else:
            del media[name]


_NUMBERING = {"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"}
"""Media that are numbers of patches, and the media with those patches: (crops, patches, values).

Numbers below 0 mean no patch.
"""


def _number_over_batch(examples: Sequence[dict[str, Any]]) -> None:
    """Number the patches of the examples' media over the whole batch, in place."""
    for name, pixels in _NUMBERING.items():
        before = 0
        for index, media in enumerate(examples):
            if name not in media:
                continue
            if pixels not in media or media[pixels].ndim != 3:
                raise invalid(
                    index,
                    name,
                    f"it numbers the patches of {pixels!r}, (crops, patches, values), not found",
                )
            media[name] = np.where(media[name] < 0, media[name], media[name] + before)
            before += media[pixels].shape[0] * media[pixels].shape[1]


def join(
    examples: Sequence[dict[str, Any]], rows: Sequence[Any], by_row: bool
) -> dict[str, np.ndarray]:
    """Return the media of a batch by name, end to end; `rows` list the examples in each row.

    By row they come as (1, images, ...) and become (rows, images, ...), with empty images at the
    end of rows with fewer; so do masks of `SEEN`, (rows, tokens, images, ...), along the diagonal.
    Values of other sizes, as pixels of images of several sizes, are padded with zeros.
    """
    _number_over_batch(examples)
    found = {}
    for name in dict.fromkeys(chain.from_iterable(examples)):
        given = {number: media[name] for number, media in enumerate(examples) if name in media}
        if not by_row and name not in SEEN:
            found[name] = _concatenate(name, [*given.values()])
            continue
        for number, values in given.items():
            if values.shape[:1] != (1,) or values.ndim < 2:
                raise invalid(number, name, f"found {values.shape}; wanted (1, images, ...)")
        of_rows = [[given[number][0] for number in row if number in given] for row in rows]
        like = next(of_row[0][:0] for of_row in of_rows if of_row)
        joined = [_concatenate(name, of_row or [like]) for of_row in of_rows]
        whole = _concatenate(name, [each[None] for each in joined])
        found[name] = whole.swapaxes(1, 2) if name in SEEN else whole
    return found


def _concatenate(name: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays joined on the first axis, padded with zeros to the largest on the others."""
    shapes = {value.shape[1:] for value in values}
    if len({len(shape) for shape in shapes}) > 1:
        raise unusable(
            f"{name!r}: found values of {sorted(map(len, shapes))} dimensions in one batch"
        )
    if len(shapes) > 1:
        largest = np.max([*shapes], axis=0)
        values = [
            np.pad(value, [(0, 0), *((0, int(n)) for n in largest - value.shape[1:])])
            for value in values
        ]
    return np.concatenate(values)


def read_pictures(
    processor: Any, pictures: Sequence[list[Any]], rows: Sequence[Any], by_row: bool, tensors: str
) -> dict[str, Any]:
    """Return the tensors that an image processor makes of a batch's pictures; {} for none."""
    if not any(pictures):
        return {}
    made = [[*chain.from_iterable(pictures[number] for number in row)] for row in rows]
    images = made if by_row else [*chain(*made)]
    read = getattr(processor, "image_processor", processor)(images=images, return_tensors=tensors)
    return {name: value for name, value in read.items() if holds_media(name)}

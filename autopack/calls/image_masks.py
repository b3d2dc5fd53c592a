"""Calls of models whose text attends to images across: which document sees which images, read once per call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopack.calls.call import Call
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import media
from autopack.layout import seen_images
from autopack.layout.packed import PackedLayout
from autopack.layout.seen_images import SeenImages

_OF_IMAGES = "aspect_ratio_ids"
"""An argument (rows, images) that is 0 for images that fill up a row."""


def of_packed(call: Call, layout: PackedLayout) -> SeenImages | None:
    """The images that documents of packed rows see; None for a model that does not attend to any, or text alone.

    Raises `InvalidPacking` where the mask does not give each document its own, and `UnsupportedModel` where attention
    weights are asked for.
    """
    name, given = call.model.traits.image_mask, call.arguments
    if name is None or not media.given(given):
        return None
    mask = given.get(name)
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape[:2]) != (layout.rows, layout.columns):
        shape = "none" if mask is None else f"shape {tuple(getattr(mask, 'shape', ()))}"
        raise InvalidPacking(
            f"{name} says which document of packed rows sees which images; wanted (rows, columns, images, ...) of "
            f"{(layout.rows, layout.columns)}, found {shape}. autopack.PackingCollator makes it of those of documents."
        )
    if call.wants_weights:
        raise UnsupportedModel(
            f"{call.name} was asked for attention weights with packed rows and images, of which every document reads "
            f"its own. Leave output_attentions out, or run the documents one per row."
        )
    found = seen_images.of_documents(mask, layout, _real(given))
    if isinstance(found, str):
        raise InvalidPacking(
            f"{name} does not give each document of packed rows its own images, in the order of the documents: "
            f"{found}. autopack.PackingCollator makes it of those of documents."
        )
    return found


def of_batch(call: Call) -> SeenImages | None:
    """The images of each row of a batch of one document per row; None where nothing tells, and all is upstream's."""
    name, given = call.model.traits.image_mask, call.arguments
    mask = None if name is None or call.inputs is None else given.get(name)
    if call.inputs is None or not isinstance(mask, torch.Tensor) or call.continues or not media.given(given):
        return None
    if tuple(mask.shape[:2]) != tuple(call.inputs.shape[:2]):
        return None
    return seen_images.of_rows(mask, _real(given))


def _real(given: Mapping[str, Any]) -> torch.Tensor | None:
    ids = given.get(_OF_IMAGES)
    return ids != 0 if isinstance(ids, torch.Tensor) else None

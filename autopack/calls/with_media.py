"""Calls with images or other media: each document gets the results that it gets alone.

Positions that a model computes from its tokens and media (M-RoPE) are computed for each document by
itself. The models number the rows of a batch one by one, and take the sizes of their images in the
order of the rows. So the documents are handed to the model's own function as right-padded rows:
every document is numbered as it is alone, with its own images, under any scheme. For text that
attends to images across, each document's images are read from the mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from autopack.calls.call import Call
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import media
from autopack.layout import prepared
from autopack.layout.forms import Frame, described
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout, real_documents
from autopack.layout.prepared import SeenImages
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import CACHES
from autopack.runtime.scope import Scope

_WHOLE = "compute_3d_position_ids"  # since 5.0; it says when positions are computed at all
_INDEX = "get_rope_index"
_STATE = "rope_deltas"
_OF_IMAGES = "aspect_ratio_ids"
"""An argument (rows, images) that is 0 for images that fill up a row."""


def _first_method(call: Call, *names: str) -> tuple[PreTrainedModel, Callable[..., Any]] | None:
    """Return (entry, method) of the first entry, inward, that has a method of `names`; or None."""
    entries = call.anatomy.entries[call.entry.level :]
    found = ((e, getattr(e, name)) for e in entries for name in names if hasattr(e, name))
    return next(found, None)


def positions_of_documents(call: Call, layout: PackedLayout) -> Tensor | None:
    """Return the model's positions (axes, rows, columns) for documents with media; None if none.

    None for text alone, and for models that do not number media. Positions of three axes that the
    call gives are left alone (None); positions of one axis only tell where documents begin, as
    collators write them. A model that counts images over the rows of a batch is asked for one
    document at a time. Raises `InvalidPacking` if the model cannot number the documents with the
    media of the call.
    """
    arguments = call.arguments
    told, found = arguments.get("position_ids"), _first_method(call, _WHOLE, _INDEX)
    if found is None or (told is not None and told.dim() == 3):
        return None
    model, compute = found
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(compute).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    sizes = media.given({name: value for name, value in arguments.items() if name in parameters})
    if not sizes:
        return None  # text is numbered as everywhere
    # Qwen-Omni's numbering takes these under other names.
    lengths, mask = arguments.get("audio_feature_lengths"), arguments.get("feature_attention_mask")
    lengths = lengths if mask is None else mask.sum(dim=1)
    others = {"audio_seqlens": lengths, "second_per_grids": arguments.get("video_second_per_grid")}
    arguments = {
        **arguments,
        **{name: value for name, value in others.items() if value is not None},
    }
    if arguments.get("input_ids") is None:
        raise InvalidPacking(
            f"{type(model).__name__} numbers the tokens of a document by its input_ids and "
            f"{', '.join(sizes)}, but inputs_embeds came without input_ids. Pass input_ids, or "
            "position_ids of shape (3, rows, columns) that were computed for each document.",
            code="media-positions",
        )
    later = np.flatnonzero(real_documents(layout) & (layout.first_positions != 0))
    if layout.first_positions is not None and len(later):
        # The positions that the images of an earlier row have used up are not known.
        raise InvalidPacking(
            f"document {later[0]} begins at position {layout.first_positions[later[0]]} and comes "
            "with images or other media; what came before it decides how its tokens are numbered. "
            "Let position_ids begin at 0 in every document, or pass those of shape (3, rows, "
            "columns).",
            code="media-positions",
        )
    given, documents = _documents_as_rows(parameters, arguments, layout)
    ask = partial(_each_row_by_itself, compute) if call.traits.counts_images else compute
    try:
        with _rope_deltas_kept(model):
            numbers = ask(**given)
    except (StopIteration, RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InvalidPacking(
            f"{type(model).__name__} cannot number each document with its own media; it says: "
            f"{type(error).__name__}: {error}. {', '.join(sizes)} must hold the media of all "
            "documents, in the order of the documents, and every placeholder token needs its "
            "place in one of them.",
            code="media-positions",
        ) from error
    positions = numbers[0] if isinstance(numbers, tuple) else numbers
    return None if positions is None else documents.restore(positions, axis=2).contiguous()


def _documents_as_rows(
    parameters: Mapping[str, Any], arguments: Mapping[str, Any], layout: PackedLayout
) -> tuple[dict[str, Any], TokenMap]:
    """Return a function's arguments, documents as right-padded rows, and the map into the rows."""
    documents = TokenMap.of_documents(layout, np.arange(len(layout.lengths)))
    mask, frame = documents.mask.long(), Frame(*layout.shape)
    call: dict[str, Any] = {}
    for name, parameter in parameters.items():
        value = arguments.get(name)
        # The sizes of two images may have the shape of two short rows.
        if isinstance(value, Tensor) and not media.holds_media(name) and name != "second_per_grids":
            value = frame.changed(name, value, documents.gather)
        if value is not None or parameter.default is inspect.Parameter.empty:
            call[name] = value
    # A packed call continues no cache, and its mask has become the layout.
    return {
        **call,
        "attention_mask": mask,
        **{name: None for name in CACHES if name in parameters},
    }, documents


def positions_of_rows(call: Call) -> Tensor | None:
    """Return positions (axes, rows, columns) of a padded batch, each row numbered alone, or None.

    The model itself numbers the images over all rows. None if the call has no such images, or
    brings positions.
    """
    arguments, found = call.arguments, _first_method(call, _WHOLE)
    if found is None or "position_ids" in call.given or "mm_token_type_ids" not in call.given:
        return None
    model, compute = found
    given = {
        name: arguments[name]
        for name in inspect.signature(compute).parameters
        if name in call.given
    }
    if not media.given(given) or "input_ids" not in given or any(name in given for name in CACHES):
        return None
    with _rope_deltas_kept(model):
        return _each_row_by_itself(compute, **given)


@contextmanager
def _rope_deltas_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore the model's `rope_deltas`, which serve generation, at the end of the block."""
    before = {name: value for name, value in vars(model).items() if name == _STATE}
    try:
        yield
    finally:
        vars(model).pop(_STATE, None)
        vars(model).update(before)


def _each_row_by_itself(compute: Callable[..., Any], **call: Any) -> Tensor:
    """Return positions (axes, rows, columns), computed row by row; an image is a run of type 1."""
    kinds = call.get("mm_token_type_ids")
    if kinds is None:
        return compute(**call)  # which says what is missing
    mask = call.get("attention_mask")
    shown = (kinds == 1) if mask is None else (kinds == 1) & (mask != 0)
    begins = shown & ~torch.nn.functional.pad(shown, (1, 0))[:, :-1]
    counts = host_values(begins.sum(dim=1)).tolist()
    pieces = {
        name: None if value is None else value.split(counts if media.given({name: value}) else 1)
        for name, value in call.items()
    }
    found = [
        compute(**{name: each and each[row] for name, each in pieces.items()})
        for row in range(len(kinds))
    ]
    return torch.cat([own[0] if isinstance(own, tuple) else own for own in found], dim=1)


def own_images(call: Call) -> tuple[Scope | None, dict[str, Any] | None]:
    """Return (scope, arguments) by which each row sees its own images only; None each if they stay.

    They stay where upstream does not mix images of rows, or no mask tells which are a row's. Images
    that only fill up a row are none of its document.
    """
    model, entry = call.model, call.entry
    mixes = model.traits.counts_images or model.traits.image_mask
    if not (mixes and call.media and call.outer is None and model.options.unpad) or entry.is_pair:
        return None, None
    if call.why_media_meet("image") is not None:
        return None, None  # of code whose images may be a matter of something else, too
    positions = positions_of_rows(call) if model.traits.counts_images else None
    mask, scope = call.arguments.get(call.traits.image_mask or ""), None
    shape = None if call.inputs is None or call.continues else call.inputs.shape[:2]
    if shape is not None and isinstance(mask, Tensor) and mask.shape[:2] == shape:
        rows, columns = shape
        layout = PackedLayout(rows, columns, np.arange(rows + 1) * columns, mask.device)
        found = prepared.images_of_documents(mask, layout, _real_images(call))
        scope = None if isinstance(found, str) else Scope(model, images=found)
    return scope, None if positions is None else {**call.arguments, "position_ids": positions}


def images_of_documents(call: Call, layout: PackedLayout) -> SeenImages | None:
    """Return the images that each packed document sees; None if text attends to no images across.

    The call must bring media. Raises `InvalidPacking` where the mask does not give each document
    its own, and `UnsupportedModel` where attention weights are asked for.
    """
    name = call.traits.image_mask
    if name is None:
        return None
    mask = call.arguments.get(name)
    if not isinstance(mask, Tensor) or mask.shape[:2] != layout.shape:
        raise InvalidPacking(
            f"{name} says which document of packed rows sees which images; wanted (rows, columns, "
            f"images, ...) of {layout.shape}, found {described(mask)}. "
            "autopack.PackingCollator makes it of those of documents.",
            code="media-of-others",
        )
    if call.wants_weights:
        raise UnsupportedModel(
            f"{call.name} was asked for attention weights with packed rows and images, of which "
            "every document reads its own. Leave output_attentions out, or run the documents one "
            "per row.",
            code="output-asked",
        )
    found = prepared.images_of_documents(mask, layout, _real_images(call))
    if isinstance(found, str):
        raise InvalidPacking(
            f"{name} does not give each document of packed rows its own images, in the order of "
            f"the documents: {found}. autopack.PackingCollator makes it of those of documents.",
            code="media-of-others",
        )
    return found


def _real_images(call: Call) -> Tensor | None:
    """Return a mask (rows, images), False for images that only fill up a row; None if unknown."""
    ids = call.arguments.get(_OF_IMAGES)
    return ids != 0 if isinstance(ids, Tensor) else None

"""Positions that a model computes from its tokens and media (M-RoPE), for each document of packed rows by itself.

The models number the rows of a batch one by one, and take the sizes of their images in the order of the rows. So the
documents are handed to the model's own function as right-padded rows: every document is numbered as it is alone, with
its own images, and nothing needs to be known of the scheme.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from autopack.errors import InvalidPacking
from autopack.inspection import media
from autopack.layout.batches import DocumentBatch
from autopack.layout.forms import Frame, Of
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import CACHES

_WHOLE = "compute_3d_position_ids"  # since 5.0; it says when positions are computed at all
_INDEX = "get_rope_index"
_STATE = "rope_deltas"


def positions_of_documents(
    entries: Sequence[PreTrainedModel],
    arguments: Mapping[str, Any],
    layout: PackedLayout,
    counts_images: bool = False,
) -> torch.Tensor | None:
    """The positions (axes, rows, columns) that the model computes for each document, or None where it computes none.

    `entries` are the model that is being called and those inside it. Positions of three axes that the call gives are
    left alone; positions of one axis only say where documents begin, as collators write them. A model that
    `counts_images` over the rows of a batch is asked for one document at a time. Raises `InvalidPacking`
    where the model cannot number the documents with the media that came along.
    """
    told = arguments.get("position_ids")
    model = next((entry for entry in entries if hasattr(entry, _WHOLE) or hasattr(entry, _INDEX)), None)
    if model is None or (told is not None and told.dim() == 3):
        return None
    compute: Callable[..., Any] = getattr(model, _WHOLE, None) or getattr(model, _INDEX)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(compute).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    sizes = media.given({name: value for name, value in arguments.items() if name in parameters})
    if not sizes:
        return None  # text is numbered as everywhere
    arguments = {**arguments, **_by_other_names(parameters, arguments)}
    if arguments.get("input_ids") is None:
        raise InvalidPacking(
            f"{type(model).__name__} numbers the tokens of a document by its input_ids and {', '.join(sizes)}, but "
            f"inputs_embeds came without input_ids. Pass input_ids, or position_ids of shape (3, rows, columns) that "
            f"were computed for each document."
        )
    _refuse_later_starts(arguments, layout)
    call, real = _as_rows(parameters, arguments, layout)
    state = vars(model).get(_STATE)
    try:
        found = _each_row_by_itself(compute, call) if counts_images else compute(**call)
    except (StopIteration, RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InvalidPacking(
            f"{type(model).__name__} cannot number each document with its own media; it says: "
            f"{type(error).__name__}: {error}. {', '.join(sizes)} must hold the media of all documents, in the order "
            f"of the documents, and every placeholder token needs its place in one of them."
        ) from error
    finally:
        if _STATE in vars(model):  # what it keeps for generation is of the last batch, and rows of documents are none
            setattr(model, _STATE, state)
    positions = found[0] if isinstance(found, tuple) else found
    return None if positions is None else real(positions)


def _by_other_names(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen-Omni hands on to where it numbers tokens by other names than those of its call."""
    lengths, mask = arguments.get("audio_feature_lengths"), arguments.get("feature_attention_mask")
    lengths = mask.sum(dim=1) if mask is not None else lengths
    found = {"audio_seqlens": lengths, "second_per_grids": arguments.get("video_second_per_grid")}
    return {name: value for name, value in found.items() if name in parameters and value is not None}


def _as_rows(
    parameters: Mapping[str, Any], arguments: Mapping[str, Any], layout: PackedLayout
) -> tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]:
    """The call for documents as right-padded rows, and how what it returns becomes the packed rows' again."""
    documents = DocumentBatch.of(layout, np.arange(len(layout.lengths)))
    mask, frame = documents.mask.long(), Frame(layout.rows, layout.columns)
    call: dict[str, Any] = {}
    for name, parameter in parameters.items():
        value = arguments.get(name)
        # The sizes of two images may have the shape of two short rows.
        if isinstance(value, torch.Tensor) and not media.holds_media(name) and name != "second_per_grids":
            form = frame.form_of(name, value)
            value = frame.each(value, form, documents.spread) if form.of is Of.TOKEN else value
        if value is not None or parameter.default is inspect.Parameter.empty:
            call[name] = value
    # A packed call continues no cache, and its mask has become the layout.
    call = {**call, "attention_mask": mask, **{name: None for name in CACHES if name in parameters}}

    def in_packed_rows(positions: torch.Tensor) -> torch.Tensor:
        flat = documents.real(positions.permute(1, 2, 0))
        return flat.reshape(layout.rows, layout.columns, -1).permute(2, 0, 1).contiguous()

    return call, in_packed_rows


def positions_of_rows(entries: Sequence[PreTrainedModel], arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """The positions (axes, rows, columns) of a batch of one document per row, of a model that numbers the images over
    all rows: each row gets those that it has alone. None where the call has no such images, or brings positions."""
    model = next((entry for entry in entries if hasattr(entry, _WHOLE)), None)
    if model is None or arguments.get("position_ids") is not None or arguments.get("mm_token_type_ids") is None:
        return None
    compute = getattr(model, _WHOLE)
    call = {name: arguments[name] for name in inspect.signature(compute).parameters if arguments.get(name) is not None}
    if not media.given(call) or call.get("input_ids") is None or any(name in call for name in CACHES):
        return None
    state = vars(model).get(_STATE)
    try:
        return _each_row_by_itself(compute, call)
    finally:
        setattr(model, _STATE, state)


def _each_row_by_itself(compute: Callable[..., Any], call: dict[str, Any]) -> torch.Tensor:
    """Positions of rows, each computed in a call with its own images alone, whose tokens are runs of type 1."""
    kinds = call.get("mm_token_type_ids")
    if kinds is None:
        return compute(**call)  # which says what is missing
    mask = call.get("attention_mask")
    shown = (kinds == 1) if mask is None else (kinds == 1) & (mask != 0)
    begins = shown & ~torch.nn.functional.pad(shown, (1, 0))[:, :-1]
    counts = host_values(begins.sum(dim=1)).tolist()
    pieces = {name: value.split(counts) for name, value in call.items() if media.given({name: value})}
    found = []
    for row in range(len(kinds)):
        here = {name: value if value is None else value[row : row + 1] for name, value in call.items()}
        own = compute(**{**here, **{name: each[row] for name, each in pieces.items()}})
        found.append(own[0] if isinstance(own, tuple) else own)
    return torch.cat(found, dim=1)


def _refuse_later_starts(arguments: Mapping[str, Any], layout: PackedLayout) -> None:
    """A document that goes on from an earlier row cannot be numbered: what its images have used up is not known."""
    first = layout.first_positions
    if first is None or not first.any():
        return
    mask = arguments.get("attention_mask")
    starts = layout.bounds[:-1]
    real = np.ones(len(starts), dtype=bool) if mask is None else host_values(mask != 0).reshape(-1)[starts]
    later = np.flatnonzero(real & (first != 0))
    if len(later):
        raise InvalidPacking(
            f"document {later[0]} begins at position {first[later[0]]} and comes with images or other media; what came "
            f"before it decides how its tokens are numbered. Let position_ids begin at 0 in every document, or pass "
            f"those of shape (3, rows, columns)."
        )

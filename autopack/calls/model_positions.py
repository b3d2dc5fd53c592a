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
    entries: Sequence[PreTrainedModel], arguments: Mapping[str, Any], layout: PackedLayout
) -> torch.Tensor | None:
    """The positions (axes, rows, columns) that the model computes for each document, or None where it computes none.

    `entries` are the model that is being called and those inside it. Positions of three axes that the call gives are
    left alone; positions of one axis only say where documents begin, as collators write them. Raises `InvalidPacking`
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
        found = compute(**call)
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
        if isinstance(value, torch.Tensor) and not media.holds_media(name):
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

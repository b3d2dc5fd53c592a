"""Refusals of packed rows: for arguments without a split by documents, for ways past the entry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.calls.call import Call
from autopack.calls.outputs import loss_of
from autopack.errors import InvalidPacking, OutsideForward, UnsupportedModel
from autopack.inspection import media
from autopack.inspection.callers import FORWARDS, STEPS, callers
from autopack.inspection.sharding import splits_rows
from autopack.layout import prepared
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout, real_documents, real_tokens
from autopack.runtime.scope import Activation

_TRAINERS = "transformers.trainer"


def refuse_bypassed_top(tops: list[Any]) -> None:
    """Raise `OutsideForward` if the `forward` of a model around this entry was called directly.

    `tops` are the models around it. A backbone called on its own is fine.
    """
    for caller in callers(function=FORWARDS):
        if any(caller is top for top in tops):
            raise OutsideForward(
                f"{type(caller).__name__}.forward was called directly, past the entry of an "
                "enabled model. Call the model itself: `model(...)`.",
                code="past-the-entry",
            )


def refuse_what_trainers_lose(call: Call) -> None:
    """Raise `InvalidPacking` in a trainer's step that treats a packed row as one document.

    Its data may come without the boundaries of documents, or its loss may add up whole rows.
    """
    model = call.model
    if call.outer is not None or model.is_settling or _TRAINERS not in sys.modules:
        return
    if holders := callers(function=STEPS):
        is_fed = call.module.training or call.has_labels
        model.neighbours.check_step(model, holders, call.name, call.declared.layout, is_fed)


def refuse_split_rows(call: Call) -> None:
    """Raise `UnsupportedModel` for a call with parts of rows that ranks share.

    A part does not tell if its row is packed: one in which no position begins anew may hold the end
    of one document and the beginning of the next.
    """
    found = splits_rows(call.model.implementations(), call.module.training)
    if found is not None:
        raise UnsupportedModel(
            f"{call.name} is called within {found}, where each rank holds a part of every row, so "
            "autopack can see neither where documents begin nor which tokens a document has on "
            "other ranks. Train packed rows without it, or call autopack.disable(model) where "
            "every row is one document.",
            code="rows-on-ranks",
        )


def obstacles(call: Call) -> Iterator[tuple[str, str]]:
    """Yield (reason, code) for what neither packed rows nor a batch without padding may have."""
    if torch.jit.is_tracing():
        yield "it is traced, and a trace would keep where documents or padding lie", "recorded-call"
    covered = call.model.neighbours.covered_mixer
    if covered is not None:
        yield f"{covered} has a forward of its own on the instance", "other-code"
    if call.unnamed:
        yield "its forward does not name some of the arguments by position", "positional-arguments"
    if call.arguments.get("use_cache") or call.continues:
        yield "a cache is wanted", "cache-given"
    if "encoder_hidden_states" in call.given:
        yield "it attends to encoder states", "argument-of-no-document"
    refused = call.traits.refused_arguments if call.media else call.traits.refused_of_text
    for name, reason in refused.items():
        if name in call.given:
            yield f"{name} was given, and {reason}", "argument-of-no-document"


def refuse(call: Call, *others: Iterator[tuple[str, str]]) -> None:
    """Raise `AutopackError` for what no packed call may have, and for `others` (reason, code)."""
    model = call.model
    model.lease.check()
    for reason, code in chain(obstacles(call), *others):
        kind = InvalidPacking if code == "cache-given" else UnsupportedModel
        raise kind(
            f"{call.name} cannot run packed rows: {reason}. Leave that out, or run the documents "
            "one per row, as padded batches or after `autopack.disable(model)`.",
            code=code,
        )
    proof = model.proof
    if proof.why_not_packed is not None:
        raise UnsupportedModel(
            f"packed rows of {call.name} are not exact: {proof.why_not_packed}", code="not-exact"
        )
    if proof.why_not_labels is not None and call.has_labels:
        raise UnsupportedModel(
            f"autopack cannot tell if the loss of packed rows of {call.name} is the loss of their "
            f"documents: {proof.why_not_labels}. Call it without labels and compute the loss from "
            "its logits, or run the documents one per row.",
            code="loss-not-of-documents",
        )
    # What an encoder has made already is a half of the call, whatever it was made of.
    of_media = sorted({*call.media} - ({"encoder_outputs"} if call.entry.is_pair else set()))
    if of_media:
        _refuse_media(call, of_media)


def check_packed(call: Call, layout: PackedLayout) -> None:
    """Raise `AutopackError` if the model or the call's arguments rule out packed rows."""
    refuse(call)
    if call.entry.earliest_position:
        refuse_early_positions(call, layout)
    for size in call.model.chunk_sizes:
        inside = {part for mixer in call.anatomy.mixers for part in mixer.modules()}
        alone = not inside.isdisjoint(call.anatomy.chunked)
        taken = layout.sizes[real_documents(layout)] if alone else np.array([layout.columns])
        if (taken % size).any():
            raise InvalidPacking(
                f"layers of {call.name} take {size} tokens at a time, and run on "
                f"{taken.tolist()}, which must be multiples of that. Load the model with "
                "chunk_size_feed_forward=0, or pad rows that do not run document by document: "
                f"PackingCollator(pad_to_multiple_of={size}).",
                code="does-not-fit",
            )
    if call.traits.whole_model_reason is not None:
        _refuse_labelled_padding(call, layout)
    head, inner = call.entry.head, call.entry.inner_head
    if head is None and inner is not None:
        raise UnsupportedModel(
            f"{call.name} holds {inner.name}, which gives one result per row, and a packed row has "
            f"several documents. Call {inner.name} itself, or run documents one per row.",
            code="result-per-row",
        )
    if head is not None and head.refusal is not None:
        raise UnsupportedModel(
            f"{head.name} cannot be run on packed rows: {head.refusal}. Run its questions as "
            "padded batches.",
            code="result-per-row",
        )


def check_loss(ended: Activation, module: nn.Module, output: Any) -> None:
    """Raise `UnsupportedModel` for a third-party loss of packed rows with unseen labels.

    Labels that came by a known name had those at boundaries ignored; others may have met the site
    of the loss.
    """
    seen = ended.met_loss or (ended.plan.packs and ended.plan.call.has_labels)
    if ended.layouts and not seen and loss_of(output) is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} computed a loss of packed rows from labels that autopack has "
            "not seen. The loss may count the first token of each document, which another document "
            "predicts. Pass the labels as `labels`, use the model's own loss_function, or compute "
            "the loss from its logits.",
            code="loss-not-of-documents",
        )


def refuse_other_documents(call: Call, layout: PackedLayout) -> None:
    """Raise `UnsupportedModel` if an inner call has other rows than the packed call around it."""
    assert call.inputs is not None
    declared, shape = call.declared.layout, tuple(call.inputs.shape[:2])
    same = declared is not None and np.array_equal(declared.bounds, layout.bounds)
    silent = declared is None and "position_ids" not in call.given and call.declared.real is None
    if shape != (layout.rows, layout.columns) or not (same or silent):
        raise UnsupportedModel(
            f"{call.name} was called inside a packed forward of {layout.rows} rows of "
            f"{layout.columns} tokens, with {shape[0]} rows of {shape[1]} tokens and other "
            "documents. Call it outside of that forward, or pass the same documents on.",
            code="call-within-call",
        )


def _refuse_labelled_padding(call: Call, layout: PackedLayout) -> None:
    """Raise `InvalidPacking` for labels at padding in a model that runs documents alone."""
    labels = call.arguments.get("labels")
    if not isinstance(labels, torch.Tensor) or tuple(labels.shape) != (layout.rows, layout.columns):
        return
    if (host_values(labels)[~real_tokens(layout)] != call.ignored_label).any():
        raise InvalidPacking(
            f"{call.name} runs documents alone and leaves padding out, but labels of packed rows "
            f"count padding. Give padding the label {call.ignored_label}.",
            code="wrong-labels",
        )


def says_it_all(call: Call, layout: PackedLayout) -> bool:
    """Return True if a packed call's own masks keep documents apart, so that it runs as it came.

    A mask that lets every document see all that it would see alone does not count: such documents
    are served. A mask that lets documents see each other contradicts other declarations. Raises
    `InvalidPacking` for that and for masks that cannot be read, and `UnsupportedModel` if a part of
    the model mixes tokens beyond any mask's reach.
    """
    given: Any = call.arguments.get("attention_mask")
    shape, is_dict = (layout.rows, layout.columns), isinstance(given, dict)
    if given is None or (isinstance(given, torch.Tensor) and given.shape == shape):
        return False
    masks = [mask for mask in (given.values() if is_dict else [given]) if mask is not None]
    if not masks or not all(prepared.is_readable(mask, shape) for mask in masks):
        refuse(call)  # caches, of which masks have columns, too
        found = (
            f"a tensor of shape {tuple(given.shape)}"
            if isinstance(given, torch.Tensor)
            else type(given).__name__
        )
        raise InvalidPacking(
            f"attention_mask must have the shape of the batch, {shape}, on packed rows, or be a "
            f"prepared mask for every pair of its columns; found {found}. Leave it out: the "
            "model makes masks within documents itself.",
            code="prepared-mask",
        )
    said = {prepared.agreement(mask, layout) for mask in masks}
    if "crosses" in said:
        raise InvalidPacking(
            f"the prepared attention_mask of {call.name} lets documents of the call see each "
            "other. Leave the mask out, and autopack keeps them apart; or leave out what declares "
            "them (position_ids, seq_idx, lengths). A mask that is added to scores must hide by "
            "the least number of its dtype: -1e4 does not hide large scores.",
            code="prepared-mask",
        )
    if said == {"same"} and not is_dict:
        return False
    if call.anatomy.mixers:
        raise UnsupportedModel(
            f"{call.name} has {type(call.anatomy.mixers[0]).__name__}, which mixes tokens past a "
            "prepared attention_mask. Leave the mask out: documents are kept apart by what else "
            "declares them.",
            code="prepared-mask",
        )
    return True


def refuse_early_positions(call: Call, layout: PackedLayout) -> None:
    """Raise `InvalidPacking` for documents that begin before the model's earliest position.

    They begin after padding's position; those before it are other rows of the table.
    """
    first, least = layout.first_positions, call.entry.earliest_position
    if first is None or not call.entry.uses_positions:
        return
    early = (first < least) & real_documents(layout)
    if early.any():
        raise InvalidPacking(
            f"position_ids of a document begin at {int(first[early][0])}, but {call.name} numbers "
            f"the first token of a document {call.entry.first_position}, so it would give other "
            "results than alone. Leave position_ids out and declare documents by seq_idx or "
            f"segment ids in attention_mask, or let them begin at {call.entry.first_position}, as "
            "autopack.PackingCollator.for_model(model) writes them.",
            code="first-position",
        )


def _refuse_media(call: Call, of_media: list[str]) -> None:
    """Raise `AutopackError` for media that documents of packed rows may not bring."""
    traits, given = call.traits, {name: call.arguments[name] for name in call.given}
    for name in of_media:
        for kind in sorted(media.kinds(name, given[name])):
            if kind not in traits.media:
                why = f": {traits.why_no_media}" if traits.why_no_media else ""
                raise UnsupportedModel(
                    f"{name} was given to {call.name} with packed rows, but documents of "
                    f"{call.anatomy.model_type!r} with {kind}s are not served{why}. Leave it out "
                    "(text alone is served), or run the documents one per row.",
                    code="media-not-served",
                )
            apart = call.why_media_meet(kind)
            if apart is not None:
                raise UnsupportedModel(
                    f"{name} was given to {call.name} with packed rows, and documents with {kind}s "
                    f"are not proven to be kept apart: {apart}. Leave it out (text alone is "
                    "served), run the documents one per row, or enable the model with verify=False "
                    "if you know that they are kept apart.",
                    code="media-not-proven",
                )
    norms = (
        f"{name} ({type(norm).__name__})"
        for name, norm in call.module.named_modules()
        if isinstance(norm, nn.modules.batchnorm._BatchNorm)
        and (norm.training or norm.running_mean is None)
    )
    norm = next(norms, None)
    if norm is not None:
        raise UnsupportedModel(
            f"{of_media[0]} was given to {call.name} with packed rows, and {norm} normalizes over "
            "the media of all documents. Freeze it (call its eval() after every train() of the "
            "model), leave the media out, or run the documents one per row.",
            code="media-mixed",
        )
    wrong = _why_images_do_not_match(call) or (
        None if traits.wrong_media is None else traits.wrong_media(given)
    )
    if wrong is not None:
        raise InvalidPacking(
            f"{call.name} got media with packed rows that are not those of its documents: {wrong}.",
            code="media-of-others",
        )
    layout = None if traits.sounds_together is None or call.entry.is_pair else call.declared.layout
    sounds = [name for name in of_media if media.kinds(name, given[name]) == {"sound"}]
    if traits.sounds_together is None or layout is None or not sounds:
        return
    why = traits.sounds_together(call.config, call.arguments, layout)
    if why is not None:
        raise InvalidPacking(
            f"{call.name} got sounds with packed rows that it would not keep apart: {why}. "
            "docs/media.md says which sounds may share a call. Or run one document per row and "
            "call.",
            code="media-mixed",
        )


def _why_images_do_not_match(call: Call) -> str | None:
    """Return the reason why images are not one per document, if they must be; or None."""
    pixels: Any = call.arguments.get("pixel_values")
    layout = call.declared.layout if call.traits.image_of_each and pixels is not None else None
    if layout is None or len(pixels) == (documents := real_documents(layout).sum()):
        return None
    return f"{len(pixels)} images and {documents} documents; each has one, in their order"


def check_documents_can_stay_padded(call: Call, reason: str) -> None:
    """Raise `UnsupportedModel` if the rows are packed documents, which padding must not reach."""
    if call.of_head is not None:
        raise UnsupportedModel(
            f"{call.of_head} cannot run the documents of packed rows without padding: {reason}. "
            "Run them one per row.",
            code="result-per-row",
        )

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
from autopack.layout.forms import described
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout, real_documents, real_tokens
from autopack.runtime.scope import Activation

_TRAINERS = "transformers.trainer"
_OF_DATA = {"cache-given", "does-not-fit", "first-position", "media-of-others", "wrong-labels"}
"""Codes of `InvalidPacking`; other obstacles are the model's (`UnsupportedModel`)."""
Obstacles = Iterator[tuple[str, str]]
"""Reasons against packed rows: (reason, code) each."""


def refuse_bypassed_top(tops: list[Any]) -> None:
    """Raise `OutsideForward` if a forward of one of `tops`, models around an entry, is running.

    A backbone called on its own is fine.
    """
    for caller in callers(function=FORWARDS):
        if any(caller is top for top in tops):
            raise OutsideForward(
                f"{type(caller).__name__}.forward was called directly, past the entry of an "
                "enabled model. Call the model itself: `model(...)`.",
                code="past-the-entry",
            )


def refuse_what_trainers_lose(call: Call) -> None:
    """Raise `InvalidPacking` in a trainer's step that would take a packed row for one document.

    Its data may come without the boundaries of documents, or its loss may add up whole rows.
    """
    model = call.model
    if call.outer is not None or model.is_settling or _TRAINERS not in sys.modules:
        return
    if holders := callers(function=STEPS):
        is_fed = call.module.training or call.has_labels
        model.neighbours.check_step(model, holders, call.name, call.declared.layout, is_fed)


def refuse_split_rows(call: Call) -> None:
    """Raise `UnsupportedModel` if code other than autopack's splits a call's rows over ranks.

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


def obstacles(call: Call) -> Obstacles:
    """Yield (reason, code) why a call can run neither packed rows nor a batch without padding."""
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


def _obstacles_of_packed(call: Call) -> Obstacles:
    """Yield (reason, code) why a call of any model, pairs included, cannot run packed rows."""
    proof = call.model.proof
    if proof.why_not_packed is not None:
        yield f"they are not exact: {proof.why_not_packed}", "not-exact"
    if proof.why_not_labels is not None and call.has_labels:
        yield (
            f"nobody knows if the loss is that of their documents: {proof.why_not_labels}. Call it "
            "without labels and compute the loss from its logits",
            "loss-not-of-documents",
        )
    # What an encoder has made already is a half of the call, whatever it was made of.
    of_media = sorted({*call.media} - ({"encoder_outputs"} if call.entry.is_pair else set()))
    if of_media:
        yield from _obstacles_of_media(call, of_media)


def _obstacles_of_media(call: Call, of_media: list[str]) -> Obstacles:
    """Yield (reason, code) why packed rows cannot have these media; raise if sounds would mix.

    Raises `InvalidPacking` for sounds that would not be kept apart.
    """
    traits, given = call.traits, {name: call.arguments[name] for name in call.given}
    for name in of_media:
        for kind in sorted(media.kinds(name, given[name])):
            if kind not in traits.media:
                why = f": {traits.why_no_media}" if traits.why_no_media else ""
                yield (
                    f"{name} was given, but documents of {call.anatomy.model_type!r} with {kind}s "
                    f"are not served{why}",
                    "media-not-served",
                )
            apart = call.why_media_meet(kind)
            if apart is not None:
                yield (
                    f"{name} was given, and documents with {kind}s are not proven to be kept "
                    f"apart: {apart}. If you know that they are, use verify=False",
                    "media-not-proven",
                )
    for name, norm in call.module.named_modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and (
            norm.training or norm.running_mean is None
        ):
            yield (
                f"{of_media[0]} was given, and {name} ({type(norm).__name__}) normalizes over the "
                "media of all documents. Freeze it (call its eval() after every train() of the "
                "model)",
                "media-mixed",
            )
    of_halves = call.entry.is_pair and not traits.image_of_each
    layout = None if of_halves else call.declared.layout
    pixels: Any = given.get("pixel_values")
    if traits.image_of_each and layout is not None and pixels is not None:
        documents = real_documents(layout).sum()
        if len(pixels) != documents:
            yield (
                f"{len(pixels)} images and {documents} documents; each has one, in their order",
                "media-of-others",
            )
    wrong = None if traits.wrong_media is None else traits.wrong_media(given)
    if wrong is not None:
        yield f"media are not those of its documents: {wrong}", "media-of-others"
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


def _obstacles_of_rows(call: Call, layout: PackedLayout) -> Obstacles:
    """Yield (reason, code) why layout, labels or head of a call of no pair rule out packed rows."""
    if call.entry.earliest_position:
        yield from early_positions(call, layout)
    for size in call.model.chunk_sizes:
        inside = {part for mixer in call.anatomy.mixers for part in mixer.modules()}
        alone = not inside.isdisjoint(call.anatomy.chunked)
        taken = layout.sizes[real_documents(layout)] if alone else np.array([layout.columns])
        if (taken % size).any():
            yield (
                f"its layers take {size} tokens at a time, and run on {taken.tolist()}, which must "
                "be multiples of that. Load the model with chunk_size_feed_forward=0, or pad rows "
                "that do not run document by document: "
                f"PackingCollator(pad_to_multiple_of={size})",
                "does-not-fit",
            )
    labels: Any = call.arguments.get("labels")
    if (
        call.traits.whole_model_reason is not None
        and getattr(labels, "shape", None) == layout.shape
        and (host_values(labels)[~real_tokens(layout)] != call.ignored_label).any()
    ):
        yield (
            "it runs documents alone and leaves padding out, but labels count padding. Give "
            f"padding the label {call.ignored_label}",
            "wrong-labels",
        )
    head, inner = call.entry.head, call.entry.inner_head
    if head is None and inner is not None:
        yield (
            f"it holds {inner.name}, which gives one result per row. Call {inner.name} itself",
            "result-per-row",
        )
    if head is not None and head.refusal is not None:
        yield f"{head.refusal}. Run its questions as padded batches", "result-per-row"


def refuse(call: Call, *others: Obstacles) -> None:
    """Raise `AutopackError` for the first obstacle to packed rows in a call or in `others`."""
    call.model.lease.check()
    for reason, code in chain(obstacles(call), _obstacles_of_packed(call), *others):
        way_out = "Or" if ". " in reason else "Leave that out, or"
        raise (InvalidPacking if code in _OF_DATA else UnsupportedModel)(
            f"{call.name} cannot run packed rows: {reason}. {way_out} run the documents one per "
            "row.",
            code=code,
        )


def check_packed(call: Call, layout: PackedLayout) -> None:
    """Raise `AutopackError` if a call of a model that is no pair cannot run packed rows."""
    refuse(call, _obstacles_of_rows(call, layout))


def check_loss(ended: Activation, module: nn.Module, output: Any) -> None:
    """Raise `UnsupportedModel` if a packed loss was made of labels that autopack has not seen.

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
    """Raise `UnsupportedModel` if an inner call's rows differ from `layout`, the outer call's."""
    assert call.inputs is not None
    declared, shape = call.declared.layout, tuple(call.inputs.shape[:2])
    same = declared is not None and np.array_equal(declared.bounds, layout.bounds)
    silent = declared is None and "position_ids" not in call.given and call.declared.real is None
    if shape != layout.shape or not (same or silent):
        raise UnsupportedModel(
            f"{call.name} was called inside a packed forward of {layout.rows} rows of "
            f"{layout.columns} tokens, with {shape[0]} rows of {shape[1]} tokens and other "
            "documents. Call it outside of that forward, or pass the same documents on.",
            code="call-within-call",
        )


def own_masks_suffice(call: Call, layout: PackedLayout) -> bool:
    """Return True if a packed call must run as it came, with its prepared masks; raise if wrong.

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
        raise InvalidPacking(
            f"attention_mask must have the shape of the batch, {shape}, on packed rows, or be a "
            f"prepared mask for every pair of its columns; found {described(given)}. Leave it out: "
            "the model makes masks within documents itself.",
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


def early_positions(call: Call, layout: PackedLayout) -> Obstacles:
    """Yield (reason, code) if documents begin before the model's earliest position.

    They begin after padding's position; those before it are other rows of the table.
    """
    entry, first = call.entry, layout.first_positions
    if first is None or not entry.uses_positions:
        return
    early = first[(first < entry.earliest_position) & real_documents(layout)]
    if len(early):
        yield (
            f"position_ids of a document begin at {int(early[0])}, but the model numbers the first "
            f"token of a document {entry.first_position}. Leave position_ids out and declare "
            "documents by seq_idx or segment ids in attention_mask, or let them begin at "
            f"{entry.first_position}, as autopack.PackingCollator.for_model(model) writes them",
            "first-position",
        )


def check_documents_can_stay_padded(call: Call, reason: str) -> None:
    """Raise `UnsupportedModel`, for `reason`, if a head made packed documents the batch's rows."""
    if call.of_head is not None:
        raise UnsupportedModel(
            f"{call.of_head} cannot run the documents of packed rows without padding: {reason}. "
            "Run them one per row.",
            code="result-per-row",
        )

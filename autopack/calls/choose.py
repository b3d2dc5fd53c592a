"""What becomes of a call: the policy, read from top to bottom."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

from autopack.calls import image_masks, refusals
from autopack.calls.call import Call
from autopack.calls.encoder_decoder.pairs import PairAsRows, PairCall
from autopack.calls.entry import Entry, Kind
from autopack.calls.generation import generates
from autopack.calls.heads import documents, per_row_outputs
from autopack.calls.media_calls import why_media_meet
from autopack.calls.model_positions import positions_of_rows
from autopack.calls.packed import Packed
from autopack.calls.padding_rules import labels_after_padding, reasons_anywhere, reasons_here
from autopack.calls.plan import Deferred, LookedAt, MaskedApart, Plan, Untouched
from autopack.calls.sequence_parallel import SharedRows, rows_shared_by
from autopack.calls.unmasked import point_out
from autopack.calls.unpadded import Unpadded
from autopack.inspection import media
from autopack.inspection.modules import is_pair
from autopack.runtime.padding_read import LOOKS
from autopack.runtime.scope import Activation

logger = logging.getLogger(__name__)

_GENERATES = "transformers generates"


def call_at(
    entry: Entry, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Activation | None = None
) -> Call:
    """A call that has arrived at an entry."""
    return (PairCall if entry.kind is Kind.PAIR else Call)(entry, module, args, kwargs, outer)


def decide(call: Call) -> Plan:
    """What becomes of a call."""
    return choose_pair(call) if isinstance(call, PairCall) else choose(call)


def choose(call: Call) -> Plan:
    """What becomes of a call of a model with one kind of tokens."""
    if generates(call.model):
        return Untouched(call.model, _GENERATES)
    plan = _choose(call)
    if plan.scope.layout is None and call.outer is None and call.model.options.unpad != "never":
        _keep_images_to_rows(call, plan)
    return plan


def _keep_images_to_rows(call: Call, plan: Plan) -> None:
    """Give each row of a batch what it gets alone, where upstream's images are a matter of all rows."""
    traits = call.model.traits
    if not (traits.counts_images or traits.image_mask) or not media.given(call.arguments):
        return
    if why_media_meet(call, "image") is not None:
        return  # of code that no run has measured, whose images may be a matter of something else
    if traits.counts_images and plan.arguments is None:
        positions = positions_of_rows([call.module, *call.entry.inner], call.arguments)
        if positions is not None:
            plan.arguments = {**call.arguments, "position_ids": positions}
    seen = image_masks.of_batch(call)
    if seen is not None:
        plan.scope = replace(plan.scope, images=seen)


def _choose(call: Call) -> Plan:
    rows = rows_shared_by(call)
    if rows is not None:
        return SharedRows(call, rows)
    refusals.refuse_split_rows(call)
    if call.outer is None and (call.module.training or call.has_labels):
        refusals.refuse_lost_documents(call.model)
    layout = call.declared.layout
    if layout is not None:
        if refusals.says_it_all(call, layout):
            apart = MaskedApart(call)
            if apart.arguments is not None:
                refusals.refuse_unnamed(call)
            return apart
        refusals.check_packed(call, layout)
        if call.declared.beside_ones and call.outer is None and not call.model.is_settling:
            _say_that_documents_are_kept_apart(call.name)
        return documents.plan(call, layout) if call.entry.head is not None else Packed(call, layout)
    if call.declared.jumps:
        _say_that_positions_jump(call.name)
    if call.declared.real is None:
        point_out(call)
    if not call.may_unpad:
        hidden = call.outer is not None and call.declared.real is None and not call.entry.inner
        why = "the mask is made outside of the text model" if hidden else _why_not_asked(call)
        return Untouched(call.model, why, call.volume, keeps_padding=hidden)
    anywhere = next(reasons_anywhere(call, call.padding), None) if call.outer is None else None
    reason = anywhere or next(reasons_here(call, call.padding), None)
    if reason is None:
        refusals.check_sites(call.model)
        return Unpadded(call)
    # What such a forward picks may be the state of padding, so nobody further in may leave that out.
    if anywhere is None and call.entry.inner and reason != per_row_outputs.REASON:
        labelled = labels_after_padding(call)
        if labelled is None:
            real = None if call.padding.real.all() else call.padding.real  # nobody reads padding where there is none
            return Deferred(call.model, reason, call.documents, real if call.outer is None else None)
        reason = labelled
    if reason == LOOKS:
        return LookedAt(call, reason, [("", call.padding.real)])
    refusals.check_documents_can_stay_padded(call, reason)
    return Untouched(call.model, reason, call.volume, keeps_padding=not call.padding.real.all())


def _why_not_asked(call: Call) -> str:
    """Why a call is none whose padding could be left out."""
    if call.inputs is None:
        return "it brings no tokens of the form (rows, columns)"
    if not call.declared.pads:
        return "it declares neither documents nor padding"
    if call.unnamed:
        return "some of its arguments came by position, and the forward does not name them"
    return "unpad='never'"


@cache
def _say_that_positions_jump(name: str) -> None:
    logger.warning(
        "position_ids of a call of %s neither go on by one nor begin anew, so autopack takes every row for one "
        "document and leaves the call as it came. If documents start there, declare them by seq_idx as well.",
        name,
    )


@cache
def _say_that_documents_are_kept_apart(name: str) -> None:
    logger.warning(
        "documents in packed rows of %s are kept apart: position_ids begin anew, beside an attention_mask of ones, by "
        "which stock transformers lets them see each other (but for FlashAttention). Losses are those of the documents "
        "alone, and not those of a run without autopack.",
        name,
    )


def choose_pair(call: PairCall) -> Plan:
    """What becomes of a call of an encoder-decoder."""
    if generates(call.model):
        return Untouched(call.model, _GENERATES)
    refusals.refuse_split_rows(call)
    layout = call.one_sided_layout()
    if layout is not None:
        refusals.check_packed(call, layout)
        return documents.plan_of_pair(call, layout)
    packs = call.find_pair()
    if packs is None:
        point_out(call)
    if packs is None or (not packs and call.model.options.unpad == "never"):
        why = "it declares neither documents nor padding" if packs is None else "unpad='never'"
        return Untouched(call.model, why, call.volume)
    if packs:
        call.check_packed()
    else:
        anywhere = call.obstacle_anywhere() if call.outer is None else None
        reason = anywhere or call.obstacle_here()
        if reason is not None:
            if anywhere is None and any(map(is_pair, call.entry.inner)):
                return Deferred(call.model, reason, None)
            if reason == LOOKS:
                return LookedAt(call, reason, call.sides)
            return Untouched(call.model, reason, call.volume, keeps_padding=True)
    refusals.check_sites(call.model)
    return PairAsRows(call, packs)

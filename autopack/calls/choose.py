"""What becomes of a call: the policy, read from top to bottom."""

from __future__ import annotations

import logging
from functools import cache

from autopack.calls import documents, of_rows, refusals
from autopack.calls.call import Call
from autopack.calls.generation import generates
from autopack.calls.packed import Packed
from autopack.calls.padding_rules import labels_after_padding, reasons_anywhere, reasons_here
from autopack.calls.pairs import PairAsRows, PairCall
from autopack.calls.plan import Deferred, Plan, Untouched
from autopack.calls.shared import SharedRows, rows_shared_by
from autopack.calls.unmasked import point_out
from autopack.calls.unpadded import Unpadded
from autopack.inspection.modules import is_pair

logger = logging.getLogger(__name__)


def choose(call: Call) -> Plan:
    """What becomes of a call of a model with one kind of tokens."""
    if generates(call.model):
        return Untouched(call.model)
    rows = rows_shared_by(call)
    if rows is not None:
        return SharedRows(call, rows)
    refusals.refuse_split_rows(call)
    if call.outer is None and (call.module.training or call.has_labels):
        refusals.refuse_lost_documents(call.model)
    layout = call.declared.layout
    if layout is not None:
        if refusals.says_it_all(call, layout):
            return Untouched(call.model, call.volume)
        refusals.check_packed(call, layout)
        return documents.plan(call, layout) if call.entry.head is not None else Packed(call, layout)
    if call.declared.jumps:
        _say_that_positions_jump(call.name)
    if call.declared.real is None:
        point_out(call)
    if not call.may_unpad:
        if call.outer is not None and call.declared.real is None and not call.entry.inner:
            call.model.tally.left["the mask is made outside of the text model"] += 1
        return Untouched(call.model, call.volume)
    anywhere = next(reasons_anywhere(call, call.padding), None) if call.outer is None else None
    reason = anywhere or next(reasons_here(call, call.padding), None)
    if reason is None:
        refusals.check_sites(call.model)
        return Unpadded(call)
    # What such a forward picks may be the state of padding, so nobody further in may leave that out.
    if anywhere is None and call.entry.inner and reason != of_rows.REASON:
        reason = labels_after_padding(call)
        if reason is None:
            return Deferred(call.model, call.documents)
    refusals.check_documents_can_stay_padded(call, reason)
    call.model.tally.left[reason] += 1
    return Untouched(call.model, call.volume)


@cache
def _say_that_positions_jump(name: str) -> None:
    logger.warning(
        "position_ids of a call of %s neither go on by one nor begin anew, so autopack takes every row for one "
        "document and leaves the call as it came. If documents start there, declare them by seq_idx as well.",
        name,
    )


def choose_pair(call: PairCall) -> Plan:
    """What becomes of a call of an encoder-decoder."""
    if generates(call.model):
        return Untouched(call.model)
    refusals.refuse_split_rows(call)
    layout = call.one_sided_layout()
    if layout is not None:
        refusals.check_packed(call, layout)
        return documents.plan_of_pair(call, layout)
    packs = call.find_pair()
    if packs is None:
        point_out(call)
    if packs is None or (not packs and call.model.options.unpad == "never"):
        return Untouched(call.model, call.volume)
    if packs:
        call.check_packed()
    else:
        anywhere = call.obstacle_anywhere() if call.outer is None else None
        reason = anywhere or call.obstacle_here()
        if reason is not None:
            if anywhere is None and any(map(is_pair, call.entry.inner)):
                return Deferred(call.model, None)
            call.model.tally.left[reason] += 1
            return Untouched(call.model, call.volume)
        call.model.tally.count(*(half.places for half in call.pair.halves))
    refusals.check_sites(call.model)
    return PairAsRows(call)

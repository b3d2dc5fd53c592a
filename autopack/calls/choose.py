"""The decision about a call: the policy, read from top to bottom."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from autopack.calls import per_row_outputs, refusals, row_heads
from autopack.calls.call import Call, came_through, generates
from autopack.calls.encoder_decoder import PairAsRows, PairCall
from autopack.calls.entry import Entry, Kind
from autopack.calls.packed import Packed
from autopack.calls.padding_rules import labels_after_padding, reasons_anywhere, reasons_here
from autopack.calls.plan import Deferred, LookedAt, MaskedApart, Plan, Untouched
from autopack.calls.sequence_parallel import SharedRows, rows_shared_by
from autopack.calls.unpadded import Unpadded
from autopack.calls.with_media import keep_images_to_rows
from autopack.inspection.configs import text_config
from autopack.inspection.modules import is_pair
from autopack.layout.host import recall
from autopack.runtime.model import Around
from autopack.runtime.padding_read import LOOKS, LOOKS_AT_STATE
from autopack.runtime.scope import Activation

logger = logging.getLogger(__name__)

_ALL_OF = 16
"""Number of first calls searched for unmasked padding; then only those at powers of two."""


def call_at(
    entry: Entry, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Activation | None = None
) -> Call:
    """Return the call that has arrived at an entry."""
    return (PairCall if entry.kind is Kind.PAIR else Call)(entry, module, args, kwargs, outer)


def decide(call: Call) -> Plan:
    """Return the plan of a call."""
    if generates(call.model):
        return Untouched(call.model, "transformers generates")
    if isinstance(call, PairCall):
        return _choose_pair(call)
    plan = _choose(call)
    if plan.scope.layout is None and call.outer is None and call.model.options.unpad:
        keep_images_to_rows(call, plan)
    return plan


def _choose(call: Call) -> Plan:
    """Return the plan of a call of a model with one kind of tokens."""
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
        if call.declared.beside_ones and call.outer is None and not call.model.is_silent:
            _say_that_documents_are_kept_apart(call.name)
        if call.model.around is not None:
            _say_what_is_around(call.model.around, call)
        return row_heads.plan(call, layout) if call.entry.head is not None else Packed(call, layout)
    if call.declared.jumps and not call.model.is_silent:
        _say_that_positions_jump(call.name)
    if call.declared.real is None:
        _point_out(call)
    why = _why_not_asked(call)
    if why is not None:
        hidden = call.outer is not None and call.declared.real is None and not call.entry.inner
        why = "the mask is made outside of the text model" if hidden else why
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
            return Deferred(call, reason, real if call.outer is None else None)
        reason = labelled
    if reason in (LOOKS, LOOKS_AT_STATE):
        return LookedAt(call, reason, [("", call.padding.real)])
    refusals.check_documents_can_stay_padded(call, reason)
    return Untouched(call.model, reason, call.volume, keeps_padding=not call.padding.real.all())


def _why_not_asked(call: Call) -> str | None:
    """Return the reason why a call is no padded batch to run without padding, or None."""
    if call.inputs is None:
        return "it brings no tokens of the form (rows, columns)"
    if not call.declared.pads:
        return "it declares neither documents nor padding"
    if call.unnamed:
        return "some of its arguments came by position, and the forward does not name them"
    return "unpad=False" if not call.model.options.unpad and call.documents is None else None


def _say_what_is_around(around: Around, call: Call) -> None:
    """Warn, once per model, if a third-party forward around it gets packed rows' results."""
    model = call.model
    if "around" in model.logged or model.is_settling or call.outer is not None or not came_through(around, model):
        return
    model.logged.add("around")
    logger.warning(
        "%s runs around an enabled %s and got packed rows. What it makes of the output is not checked: it must keep "
        "documents apart itself, by the position_ids of the batch (a mean over columns mixes them), or be given padded "
        "batches, one document per row.",
        around.name,
        call.name,
    )


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


def _choose_pair(call: PairCall) -> Plan:
    """Return the plan of a call of an encoder-decoder."""
    refusals.refuse_split_rows(call)
    layout = call.one_sided_layout()
    if layout is not None:
        refusals.check_packed(call, layout)
        return row_heads.plan_of_pair(call, layout)
    pair = call.find_pair()
    if pair is None:
        _point_out(call)
        return Untouched(call.model, "it declares neither documents nor padding", call.volume)
    if pair.packs:
        call.check_packed()
    elif not call.model.options.unpad:
        return Untouched(call.model, "unpad=False", call.volume)
    else:
        anywhere = call.obstacle_anywhere() if call.outer is None else None
        reason = anywhere or call.obstacle_here()
        if reason is not None:
            if anywhere is None and any(map(is_pair, call.entry.inner)):
                return Deferred(call, reason)
            if reason in (LOOKS, LOOKS_AT_STATE):
                return LookedAt(call, reason, call.sides)
            return Untouched(call.model, reason, call.volume, keeps_padding=True)
    refusals.check_sites(call.model)
    return PairAsRows(call)


def _point_out(call: Call) -> None:
    """Warn, once per model, if most rows of an unmasked batch begin or end with padding tokens.

    Looks only at tokens that are on the host already, without waiting for a device; at ever fewer
    calls.
    """
    tally, model = call.model.tally, call.model
    if tally.unmasked or call.outer is not None or model.is_silent or not model.options.unpad:
        return
    before = tally.training.calls + tally.evaluation.calls
    if before > _ALL_OF and before & (before - 1):
        return
    if call.arguments.get("attention_mask") is not None or call.continues:
        return
    if torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return
    ids = recall(call.arguments).get("input_ids", call.arguments.get("input_ids"))
    # By its exact type: one that is recorded has no values.
    if type(ids) is not torch.Tensor or ids.device.type != "cpu" or ids.dim() != 2 or ids.shape[1] < 3 or len(ids) < 2:
        return
    # Two of them: a text may well end with one, where it is also the token at the end of texts.
    tokens = ids.detach().numpy()
    twice = [tokens[tokens[:, one] == tokens[:, other], one] for one, other in ((-1, -2), (0, 1))]
    if max(map(len, twice)) < 2:
        return
    pad = text_config(call.config).pad_token_id
    if not isinstance(pad, int):
        return
    rows = max(int((each == pad).sum()) for each in twice)
    if rows < 2 or 2 * rows < len(ids):
        return
    tally.unmasked = True
    logger.warning(
        "a batch of %s looks padded, and brings no attention_mask: %s of its %s rows end or begin with several tokens "
        "that are pad_token_id (%s). Every column is taken for a token, as without autopack, and computed. Pass the "
        "attention_mask that the tokenizer or the collator makes, and padding is left out.",
        call.name,
        rows,
        len(ids),
        pad,
    )

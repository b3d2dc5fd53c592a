"""The decision about a call: the policy, read from top to bottom."""

from __future__ import annotations

from typing import Any

import torch

from autopack.calls import refusals, row_heads
from autopack.calls.call import Call, CallPlan
from autopack.calls.encoder_decoder import PairAsRows, PairCall
from autopack.calls.entry import Entry
from autopack.calls.outputs import ONE_PER_ROW
from autopack.calls.padding_rules import Delegate, PassThrough, reasons_anywhere, reasons_here
from autopack.calls.rows import Packed, Unpadded
from autopack.calls.sequence_parallel import SharedRows, rows_shared_by
from autopack.calls.with_media import own_images
from autopack.inspection import torches
from autopack.inspection.configs import text_config
from autopack.layout.host import recall
from autopack.runtime.model import EnabledModel, in_a_group
from autopack.runtime.padding_read import LOOKS, LOOKS_AT_STATE
from autopack.runtime.scope import Activation

_ALL_OF = 16
"""Number of first calls searched for unmasked padding; then only those at powers of two."""
_MASKED_APART = "its prepared masks keep documents apart already"
_AROUND = (
    "%s runs around an enabled %s and got packed rows. autopack does not check code outside of the "
    "model. That code must keep documents apart itself, by the position_ids of the batch (a mean "
    "over columns mixes them). Or pass padded batches, one document per row."
)
_JUMPS = (
    "position_ids of a call of %s neither go on by one nor begin anew. autopack takes every row "
    "for one document, and leaves the call unchanged. If documents start where positions jump, "
    "pass seq_idx as well."
)
_UNMASKED = (
    "a batch of %s looks padded, but has no attention_mask: %s of its %s rows end or begin with "
    "several tokens that are pad_token_id (%s). Without a mask padding is computed, as without "
    "autopack. Pass the attention_mask that the tokenizer or the collator makes, and autopack "
    "leaves padding out."
)
_KEPT_APART = (
    "autopack keeps the documents in packed rows of %s apart. Without it they see each other, "
    "since stock transformers does not look at position_ids beside an attention_mask of ones (but "
    "for FlashAttention). So losses differ from a run without autopack."
)


def call_at(
    entry: Entry,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outer: Activation | None = None,
) -> Call:
    """Return a new `Call` at an entry with these arguments; a `PairCall` for an encoder-decoder."""
    return (PairCall if entry.is_pair else Call)(entry, module, args, kwargs, outer)


def generates(model: EnabledModel) -> bool:
    """Return True if transformers' `generate()` is running on this model, without gradients.

    Positions of generation go on past padding, and restart there, without a document that begins.
    """
    return not torch.is_grad_enabled() and model.is_called_from("transformers.generation.")


def decide(call: Call) -> CallPlan:
    """Return the plan of a call: how the model runs it; raise `AutopackError` if it is refused."""
    if generates(call.model):
        return PassThrough(call, "transformers generates")
    if isinstance(call, PairCall) and call.one_sided_layout() is None:
        return _choose_pair(call)
    return _choose_rows(call)


def _choose_rows(call: Call) -> CallPlan:
    """Return the plan of a call of no pair; raise `AutopackError` if packing is refused."""
    model = call.model
    if model.options.sequence_parallel is not None or in_a_group():
        rows = rows_shared_by(call)
        if rows is not None:
            return SharedRows(call, rows)
        refusals.refuse_split_rows(call)
    refusals.refuse_what_trainers_lose(call)
    declared = call.declared
    layout = declared.layout
    if layout is None:
        return _choose_without_documents(call)
    if refusals.own_masks_suffice(call, layout):
        return _pass_through(call, _MASKED_APART)
    refusals.check_packed(call, layout)
    if declared.beside_ones and call.outer is None:
        call.say_once(_KEPT_APART, call.name)
    around = None if call.outer is not None else model.around
    # A forward of unknown place, such as Lightning's, may be running.
    if around is not None and (
        around.place is None or model.is_called_from(around.place, around.function)
    ):
        call.say_once(_AROUND, around.name, call.name)
    return Packed(call, layout) if call.entry.head is None else row_heads.plan(call, layout)


def _choose_without_documents(call: Call) -> CallPlan:
    """Return the plan of a call that declares at most padding; warn of padding without a mask."""
    if call.declared.jumps:
        call.say_once(_JUMPS, call.name)
    if call.declared.real is None:
        _warn_of_unmasked_padding(call)
    why = _why_padding_stays(call)
    if why is not None:
        hidden = (
            call.outer is not None and call.declared.real is None and not call.entry.holds_models
        )
        why = "the mask is made outside of the text model" if hidden else why
        return _pass_through(call, why, hidden)
    # nobody reads padding where there is none
    real = None if call.padding.real.all() else call.padding.real
    anywhere = next(reasons_anywhere(call, call.padding), None) if call.outer is None else None
    reason = anywhere or next(reasons_here(call, call.padding), None)
    if reason is None:
        call.model.lease.check()
        return Unpadded(call)
    # What such a forward picks may be the state of padding, so nobody further in may leave that
    # out.
    if anywhere is None and call.entry.holds_models and reason != ONE_PER_ROW:
        # A loss that is somebody else's may shift whatever it answered when it was asked.
        shifts = call.entry.shifts_labels or call.entry.foreign is not None
        if not (shifts and call.declared.labelled_after_padding):
            return Delegate(
                call, reason, *own_images(call), real=real if call.outer is None else None
            )
        reason = (
            "a label is compared with what is predicted at padding, which only this entry could "
            "mask"
        )
    looks = reason in (LOOKS, LOOKS_AT_STATE)
    if not looks:
        refusals.check_documents_can_stay_padded(call, reason)
    return _pass_through(call, reason, looks or real is not None)


def _pass_through(call: Call, reason: str, keeps_padding: bool = False) -> PassThrough:
    """Return a plan that runs a call as it came, but shows each row its own images only."""
    return PassThrough(call, reason, *own_images(call), call.volume, keeps_padding=keeps_padding)


def _why_padding_stays(call: Call) -> str | None:
    """Return why the call's form or the option `unpad` keeps padding; None if they do not."""
    if call.inputs is None:
        return "it brings no tokens of the form (rows, columns)"
    if call.declared.real is None:
        return "it declares neither documents nor padding"
    if call.unnamed:
        return "some of its arguments came by position, and the forward does not name them"
    return "unpad=False" if not call.model.options.unpad and call.of_head is None else None


def _choose_pair(call: PairCall) -> CallPlan:
    """Return the plan of an encoder-decoder's call; raise `AutopackError` if it is refused."""
    if in_a_group():
        refusals.refuse_split_rows(call)
    pair = call.find_pair()
    if pair is None:
        _warn_of_unmasked_padding(call)
        return _pass_through(call, "it declares neither documents nor padding")
    if pair.packs:
        call.check_packed()
    elif not call.model.options.unpad:
        return _pass_through(call, "unpad=False")
    else:
        anywhere = None if call.outer is not None else next(call.why_padded_anywhere(), None)
        reason = anywhere or next((reason for reason, _ in call.obstacles_here()), None)
        if reason is not None:
            if anywhere is None and call.entry.holds_pair:
                return Delegate(call, reason)
            return _pass_through(call, reason, keeps_padding=True)
    call.model.lease.check()
    return PairAsRows(call)


def _warn_of_unmasked_padding(call: Call) -> None:
    """Warn, once per model, if half the rows of an unmasked batch begin or end with pad tokens.

    Looks only at tokens that are on the host already, without waiting for a device; at ever fewer
    calls.
    """
    model, tally, ids = call.model, call.model.tally, call.arguments.get("input_ids")
    before = tally.training.calls + tally.evaluation.calls
    if (
        tally.unmasked
        or model.is_silent
        or not model.options.unpad
        or (before > _ALL_OF and before & (before - 1))
        or call.outer is not None
        or "attention_mask" in call.given
        or call.continues
        or torches.is_recorded()
    ):
        return
    ids, pad = recall({"": ids}).get("", ids), text_config(call.config).pad_token_id
    # By its exact type: one that is recorded has no values.
    if (
        type(ids) is not torch.Tensor
        or ids.device.type != "cpu"
        or ids.dim() != 2
        or ids.shape[1] < 3
        or not isinstance(pad, int)
    ):
        return
    # Two of them: a text may well end with one, where it is also the token at the end of texts.
    rows = max(int((ids[:, ends] == pad).all(1).sum()) for ends in ([0, 1], [-2, -1]))
    if rows < 2 or 2 * rows < len(ids):
        return
    tally.unmasked = True
    call.say_once(_UNMASKED, call.name, rows, len(ids), pad)

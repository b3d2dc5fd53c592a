"""Compare a plain call with stock: packed rows with their last and first document alone, a padded
batch with itself.

Code that moves no document when others are replaced may still number tokens by columns. A call is
plain if its model makes results for tokens, of text alone; of others the twin tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopack.auditing.compare import (
    BOUNDS,
    OTHER_CHOICES,
    OTHER_EXPERTS,
    Arguments,
    Difference,
    bound_in_use,
    error_by_token,
    relative_error,
)
from autopack.auditing.fields import Sides, fields_of
from autopack.calls.call import DROPPED, LAST_LOGITS, Call
from autopack.calls.encoder_decoder import PairCall
from autopack.calls.outputs import loss_of
from autopack.calls.sequence_parallel import exchange_of
from autopack.inspection import media, releases
from autopack.inspection.randomness import state_of
from autopack.layout.forms import Frame
from autopack.layout.packed import real_documents
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import LAYOUT_KWARGS, Of
from autopack.watching.influence import has_experts
from autopack.watching.schedule import (
    CannotTell,
    Runs,
    is_padded,
    precisions,
    sides_of,
    unnoticed,
)

_OWN, _TOGETHER = 1, 3
"""Runs of each rank that gathers parameters together with others: as its call came, and all, the
others of stock."""
_ITEMS = "num_items_in_batch"
_NOT_ALONE = {*DROPPED, *LAYOUT_KWARGS, *LAST_LOGITS, "position_ids", _ITEMS}
Compared = Iterator[tuple[str, Tensor, Tensor, int]]
"""Names of fields, their values in a call and in stock by token, and documents.

A value without axes is a loss.
"""


def difference_to_stock(
    call: Call, losses: bool = False, packs: bool = True, proves: bool = False
) -> Difference:
    """Return how far the results of a call are from stock's; raise `CannotTell` if unsure.

    Of packed rows these are the last and the first document alone, with `losses` their losses too,
    for which the call runs with the labels of one document; of a padded batch without its padding
    it is the batch. Where the batch `proves` that its kind may run so, it also differs if rounding
    may have chosen other experts for a few tokens. Ranks that run together run equally often,
    whatever they have, also where a call does not pack.
    """
    with unnoticed(call) as runs, precisions() as dtypes:
        padded = is_padded(call)
        with runs.on_ranks(packs, _OWN, _TOGETHER):
            arguments = _without_labels_behind_padding(call) if padded else call.arguments
            sides = _comparable_sides(call)
            output = runs(arguments)
            compared = (
                _compare_padded(runs, arguments, output, sides)
                if padded
                else _compare_packed(call, runs, output, sides, losses)
            )
            found = [
                _difference(call, name, one, other, number, bound_in_use(dtypes), proves)
                for name, one, other, number in compared
                if one.shape == other.shape and other.numel()
            ]
        if not found:
            raise CannotTell("no field of its output has a counterpart in a document alone")
        worst = max(found, key=lambda each: each.excess)
        if worst.excess > 1 and not runs.together:
            worst = runs.widened(worst, fields_of(output), arguments)
            if worst.excess <= 1:
                raise CannotTell(f"{worst.name} differs from run to run")
        return worst


def _compare_packed(call: Call, runs: Runs, output: Any, sides: Sides, losses: bool) -> Compared:
    """Yield (name, in the packed call, alone in stock, number) of the last and first document."""
    found = fields_of(output)
    for number in dict.fromkeys((sides.count - 1, 0)):
        before = state_of(call.module)
        alone = runs.stock(_arguments_alone(call, number))
        if state_of(call.module) != before:
            raise CannotTell("its forward draws random numbers that autopack cannot switch off")
        for name, value in fields_of(alone).items():
            pair = sides.pair_of(name, found[name], number, value) if name in found else None
            if pair is not None:
                yield name, *pair, number
        if losses and _labels_select_loss(call):
            labels = call.arguments["labels"]
            kept = torch.from_numpy(sides.halves[0].owner == number).to(labels.device)
            given = {name: value for name, value in call.arguments.items() if name != _ITEMS}
            given["labels"] = labels.masked_fill(~kept, call.ignored_label)
            yield from _compare_losses(runs(given), alone, number)


def _compare_padded(runs: Runs, arguments: Arguments, output: Any, sides: Sides) -> Compared:
    """Yield (name, without padding, in stock, 0) for the fields and the loss of a padded batch."""
    wanted = runs.stock(arguments)
    found, everybody = fields_of(output), np.ones(sides.count, dtype=bool)
    for name, value in fields_of(wanted).items():
        if name in found:
            one, other = (sides.part(name, each, everybody) for each in (found[name], value))
            if one is None or other is None:  # what is nobody's
                one, other = found[name].reshape(1, -1), value.reshape(1, -1)
            yield name, one, other, 0
    yield from _compare_losses(output, wanted, 0)


def _compare_losses(output: Any, wanted: Any, number: int) -> Compared:
    """Yield ("loss", loss, stock's loss, number) if both exist and stock's is finite."""
    found, loss = loss_of(output), loss_of(wanted)
    if found is not None and loss is not None and bool(loss.isfinite()):
        yield "loss", found, loss, number


def _difference(
    call: Call,
    name: str,
    one: Tensor,
    other: Tensor,
    number: int,
    tolerance: float,
    proves: bool,
) -> Difference:
    """Return the `Difference` of a field from stock; raise `CannotTell` if experts may differ."""
    than = "than in its padded batch" if is_padded(call) else "than it gets alone"
    if not other.dim():
        bound = max(tolerance, BOUNDS[torch.float32].losses)
        return Difference(name, relative_error(one, other, least=1.0), bound, number, than)
    errors = error_by_token(one, other)
    # A choice between two that are all but equal may go the other way by rounding, at a few tokens.
    few = len(errors) > 1 and float(errors.mean()) <= OTHER_CHOICES
    error = 0.0 if few and not other.is_floating_point() else float(errors.max())
    few = float(errors.median()) <= OTHER_EXPERTS
    if error > tolerance and few and has_experts(call.module) and not proves:
        raise CannotTell("rounding may have chosen other experts for some tokens")
    return Difference(name, error, tolerance, number, than)


def _comparable_sides(call: Call) -> Sides:
    """Return the `Sides` of a call; raise `CannotTell` if stock's results are not comparable."""
    if exchange_of(call.model) is not None:
        raise CannotTell("stock's attention exchanges tokens with other ranks")
    has_media = bool(media.given(call.arguments))
    if is_padded(call):
        if call.model.traits.counts_images and has_media:
            raise CannotTell("stock numbers its images by rows")
        if not _stock_ignores_padding(call):
            raise CannotTell("results of stock depend on where padding stands")
        return sides_of(call)
    layout = None if isinstance(call, PairCall) else call.declared.layout
    if layout is None or call.entry.head is not None or has_media:
        raise CannotTell(
            "only packed text of models with a result per token is compared with stock"
        )
    starts, first = layout.first_positions, call.entry.first_position
    begins = starts is None or bool((starts[real_documents(layout)] == first).all())
    if call.entry.uses_positions and not (begins and layout.largest_positions is None):
        raise CannotTell("its documents have positions of their own")
    return Sides(sides_of(call).halves[:1])


def _stock_ignores_padding(call: Call) -> bool:
    """Return True if padding changes no token's results in stock."""
    # By flash kernels upstream lets a decoder see the padding of its encoder. Attention modules of
    # older releases have no configuration, so the model's own is asked too.
    if isinstance(call, PairCall):
        own = getattr(call.module.config, "_attn_implementation", None)
        return not any(map(releases.is_flash, (own, *call.model.implementations())))
    if call.declared.real is None:
        return True
    return not call.model.traits.padding_matters or (
        call.padding.on_the_right and not call.model.anatomy.has_row_dependent_rotary
    )


def _arguments_alone(call: Call, number: int) -> Arguments:
    """Return a call's arguments for one document alone; raise `CannotTell` if any cannot be cut."""
    layout = call.declared.layout
    assert layout is not None
    batch = TokenMap.of_documents(layout, np.flatnonzero(real_documents(layout))[[number]])
    frame = Frame(*batch.shape, shared=True)
    found: Arguments = {}
    for name, value in call.arguments.items():
        counted = (
            name == "position_ids" and call.entry.uses_positions and getattr(value, "ndim", 0) == 2
        )
        if name in _NOT_ALONE and not counted:
            continue
        if frame.unit_of(name, value) not in (Of.TOKEN, Of.CALL):
            raise CannotTell(f"what of {name} belongs to which document is not known")
        found[name] = frame.changed(name, value, batch.gather)
    return found


def _labels_select_loss(call: Call) -> bool:
    """Return True if a call with one document's labels alone returns that document's loss."""
    labels, inputs = call.arguments.get("labels"), call.inputs
    return (
        isinstance(labels, Tensor)
        and isinstance(inputs, Tensor)
        and not labels.is_floating_point()
        and labels.shape == inputs.shape[:2]
        and call.arguments.get("shift_labels") is None
        and call.model.proof.why_not_labels is None
        and bool(call.model.proof.source)
        and not call.wants_router_loss
    )


def _without_labels_behind_padding(call: Call) -> Arguments:
    """Return a call's arguments, but ignore labels that stock scores by predictions at padding.

    The call leaves these terms out of its loss.
    """
    found = dict(call.arguments)
    if (
        not isinstance(call, PairCall)
        and call.entry.shifts_labels
        and call.declared.labelled_after_padding
    ):
        real = torch.from_numpy(call.padding.real)
        behind = torch.nn.functional.pad(~real[:, :-1], (1, 0)) & real
        for name, hidden in (("labels", behind), ("shift_labels", ~real)):
            if isinstance(labels := found.get(name), Tensor):
                found[name] = labels.masked_fill(hidden.to(labels.device), call.ignored_label)
    return found

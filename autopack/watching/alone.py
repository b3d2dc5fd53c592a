"""Compare a plain call with stock: packed rows with their last and first document alone, a padded batch with itself.

Code that moves no document when others are replaced may still number tokens by columns. A call is plain if its model
makes results for tokens, of text alone; of others the twin tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopack.auditing.auditor import LOSS_TOLERANCE, TOLERANCE
from autopack.auditing.fields import Fields, chunks, fields_of, scale_of
from autopack.auditing.running import forget_lengths
from autopack.calls.call import DROPPED, LAST_LOGITS, Call
from autopack.calls.encoder_decoder import PairCall
from autopack.calls.outputs import loss_of
from autopack.calls.sequence_parallel import exchange_of
from autopack.inspection import media
from autopack.inspection.modules import row_dependent_rotaries
from autopack.inspection.randomness import state_of
from autopack.layout.forms import holds_tensors
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.runtime import scope
from autopack.watching.conditions import Runs, precisions, unnoticed
from autopack.watching.owners import CannotTell, Side, count_of, part_of, sides_of
from autopack.watching.replaced import how_far, routes
from autopack.watching.schedule import is_padded

_TOLERANCE = {**TOLERANCE, torch.float64: 1e-5}
"""A good part of the models in float64 casts to float32 in code of its own."""
_OTHER_CHOICES = 0.1
"""Share of tokens that may have another whole number, such as that of their likeliest class, by rounding."""
_OTHER_EXPERTS = 0.1
"""Median error of tokens up to which rounding may have chosen other experts for a few of them."""
_ITEMS = "num_items_in_batch"
_NOT_ALONE = {*DROPPED, *LAYOUT_KWARGS, *LAST_LOGITS, "position_ids", _ITEMS}


@dataclass(frozen=True)
class Difference:
    """The part of a call that differs the most from stock, relative to its standard deviation."""

    name: str
    error: float
    tolerance: float
    document: int


def of_packed(call: Call, losses: bool) -> Difference:
    """Return the largest difference of the last and the first document to what stock gives them alone.

    With `losses` also that of their loss, for which the call runs with the labels of one document. Raises `CannotTell`.
    """
    side = _side_of_packed(call)
    with unnoticed(call.module, call.model), precisions() as dtypes:
        compared = _Compared(call)
        packed = compared.runs(call.arguments)
        for number in _last_and_first(side):
            before = state_of(call.module)
            alone = compared.stock(_cut(call, side, number))
            if state_of(call.module) != before:
                raise CannotTell("its forward draws random numbers that autopack cannot switch off")
            compared.add_document(packed, alone, side, number)
            if losses and _has_a_loss_of_its_own(call):
                compared.add_loss(call, side, number, alone)
        return compared.worst(dtypes, call.arguments, packed)


def of_ranks(call: Call, packs: bool) -> Difference:
    """Do the same on a rank that gathers parameters together with others, in three runs. Raises `CannotTell`.

    A rank whose call cannot be compared, or does not pack, runs it once as it came and twice as stock.
    """
    padded, side, reason = is_padded(call), None, None
    todo: list[tuple[int, dict[str, Any]]] = [(0, call.arguments)] * 2
    try:
        if not packs:
            raise CannotTell("the call packed nothing")
        if padded:
            _refuse_padded(call)
            todo = [(0, _without_labels_behind_padding(call))] * 2
        else:
            side = _side_of_packed(call)
            todo = [(number, _cut(call, side, number)) for number in (count_of([side]) - 1, 0)]
    except CannotTell as found:
        reason = found
    with unnoticed(call.module, call.model), precisions() as dtypes:
        compared = _Compared(call)
        output = compared.runs(todo[0][1] if padded else call.arguments)
        for number, arguments in todo:
            wanted = compared.stock(arguments)
            if reason is None and side is not None:
                compared.add_document(output, wanted, side, number)
            elif reason is None:
                compared.add_batch(output, wanted)
    if reason is not None:
        raise reason
    return compared.worst(dtypes)


def _side_of_packed(call: Call) -> Side:
    layout = None if isinstance(call, PairCall) else call.declared.layout
    if layout is None or call.entry.head is not None or media.given(call.arguments):
        raise CannotTell("it is no plain call of packed rows")
    _refuse_exchanges(call)
    if call.entry.uses_positions and not _counts_from_the_first(call, layout):
        raise CannotTell("its documents have positions of their own")
    return sides_of(call)[0]


def _last_and_first(side: Side) -> list[int]:
    return list(dict.fromkeys((count_of([side]) - 1, 0)))


def _refuse_padded(call: Call) -> None:
    if call.model.traits.counts_images and media.given(call.arguments):
        raise CannotTell("stock numbers its images by rows")
    _refuse_exchanges(call)
    if not isinstance(call, PairCall) and call.declared.real is not None and not _strips(call):
        raise CannotTell("what stock gives depends on where padding stands")
    sides_of(call)


def of_padded(call: Call) -> Difference:
    """Return the largest difference of a padded batch without its padding to what stock makes of the batch."""
    _refuse_padded(call)
    arguments = _without_labels_behind_padding(call)
    with unnoticed(call.module, call.model), precisions() as dtypes:
        compared = _Compared(call)
        found, wanted = compared.runs(arguments), compared.stock(arguments)
        compared.add_batch(found, wanted)
        return compared.worst(dtypes, arguments, found)


def _refuse_exchanges(call: Call) -> None:
    if exchange_of(call.model) is not None:
        raise CannotTell("stock's attention exchanges tokens with other ranks")


def _strips(call: Call) -> bool:
    """Return True if stock gives tokens of a padded batch what they get without the padding."""
    traits = call.model.traits
    reads = traits.recurs or traits.reads_padding or traits.counts_columns
    return not reads or (call.padding.on_the_right and not call.model.anatomy.has_row_dependent_rotary)


class _Compared:
    """Fields of a call beside those of stock."""

    def __init__(self, call: Call):
        self._call, self.runs = call, Runs(call)
        self._found: list[tuple[str, torch.Tensor, bool, int]] = []
        self.losses: list[tuple[float, int]] = []

    def stock(self, arguments: dict[str, Any]) -> Any:
        """Return stock's output of a call, whatever ran before it."""
        with scope.stock(self._call.model):
            forget_lengths(row_dependent_rotaries(self._call.module))
            try:
                return self.runs(arguments)
            except CannotTell:
                raise
            except Exception:  # of a row without its padding some types make no cache
                return self.runs({**arguments, "use_cache": False})

    def add_document(self, packed: Any, alone: Any, side: Side, number: int) -> None:
        """Compare what a document has in a packed output with what it has alone."""
        mine, every = np.arange(count_of([side])) == number, np.ones(1, dtype=bool)
        whole = Side(np.zeros((1, int((side.owner == number).sum())), dtype=int))
        self.add(fields_of(packed), fields_of(alone), [[side], [whole]], [mine, every], number)

    def add_batch(self, found: Any, wanted: Any) -> None:
        """Compare all of a padded batch in two outputs."""
        sides = sides_of(self._call)
        everybody = np.ones(count_of(sides), dtype=bool)
        self.add(fields_of(found), fields_of(wanted), [sides, sides], [everybody, everybody], 0, whole=True)
        losses = loss_of(found), loss_of(wanted)
        if losses[0] is not None and losses[1] is not None and bool(losses[1].isfinite()):
            self.losses.append((_gap_of_losses(losses[0], losses[1]), 0))

    def add(
        self,
        found: Fields,
        wanted: Fields,
        sides: list[list[Side]],
        chosen: list[np.ndarray],
        number: int,
        whole: bool = False,
    ) -> None:
        """Compare what the chosen documents have in two outputs; with `whole` also what is nobody's."""
        for name, value in wanted.items():
            if name not in found:
                continue
            parts = [part_of(s, name, v, c) for s, v, c in zip(sides, (found[name], value), chosen, strict=True)]
            if None in parts and whole:
                parts = [found[name].reshape(1, -1), value.reshape(1, -1)]
            one, other = parts
            if one is not None and other is not None and one.shape == other.shape and other.numel():
                self._found.append((name, error_by_token(one, other), other.is_floating_point(), number))

    def add_loss(self, call: Call, side: Side, number: int, alone: Any) -> None:
        """Compare the loss of a call in which nothing but one document is labelled with its loss alone."""
        labels = call.arguments["labels"]
        kept = torch.from_numpy(side.owner == number).to(labels.device)
        given = {name: value for name, value in call.arguments.items() if name != _ITEMS}
        given["labels"] = labels.masked_fill(~kept, call.ignored_label)
        found, wanted = loss_of(self.runs(given)), loss_of(alone)
        if found is not None and wanted is not None and bool(wanted.isfinite()):
            self.losses.append((_gap_of_losses(found, wanted), number))

    def worst(
        self, dtypes: set[torch.dtype], arguments: dict[str, Any] | None = None, output: Any = None
    ) -> Difference:
        """Return the part that differs the most, by its tolerance. Raises `CannotTell`.

        Also if another run with the `arguments` of an `output` gives another one; ranks make no run more.
        """
        tolerance = max((_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)
        of_losses = max(tolerance, *(LOSS_TOLERANCE.get(dtype, 1e-3) for dtype in dtypes), 1e-3)
        found = [Difference("loss", gap, of_losses, number) for gap, number in self.losses]
        for name, errors, is_floating, number in self._found:
            error = float(errors.max())
            # A choice between two that are all but equal may go the other way by rounding, at a few tokens.
            error *= is_floating or float(errors.mean()) > _OTHER_CHOICES or len(errors) == 1
            if error > tolerance and routes(self._call.module) and float(errors.median()) <= _OTHER_EXPERTS:
                raise CannotTell("rounding may have chosen other experts for some tokens")
            found.append(Difference(name, error, tolerance, number))
        if not found:
            raise CannotTell("no part of its output can be compared with what a document gets alone")
        worst = max(found, key=lambda each: each.error / each.tolerance)
        first = None if arguments is None else fields_of(output).get(worst.name)
        if arguments is not None and worst.error > worst.tolerance and first is not None:
            again = self.runs.fields(arguments).get(worst.name)
            if again is not None and how_far(worst.name, first, again).excess > 1:
                raise CannotTell(f"{worst.name} is another one in each run")
        return worst


def _counts_from_the_first(call: Call, layout: PackedLayout) -> bool:
    starts = layout.first_positions
    real = slice(None) if layout.is_padding is None else ~layout.is_padding
    begins = starts is None or bool((starts[real] == call.entry.first_position).all())
    return begins and layout.largest_positions is None


def _cut(call: Call, side: Side, number: int) -> dict[str, Any]:
    """Return the arguments of one document alone. Raises `CannotTell`."""
    row, (first, end) = side.place_of(number)
    found: dict[str, Any] = {}
    for name, value in call.arguments.items():
        counted = name == "position_ids" and call.entry.uses_positions and getattr(value, "ndim", 0) == 2
        if name in _NOT_ALONE and not counted:
            continue
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            if value.shape[:2] == side.owner.shape:
                value = value[row : row + 1, first:end]
            elif value.dim() > 1 and (value.shape[0], value.shape[1]) == (1, side.owner.shape[1]):
                value = value[:, first:end]
            else:
                raise CannotTell(f"what of {name} belongs to which document is not known")
        elif holds_tensors(value):
            raise CannotTell(f"what of {name} belongs to which document is not known")
        found[name] = value
    return found


def _has_a_loss_of_its_own(call: Call) -> bool:
    """Return True if the loss of a call with the labels of one document is the loss of that document alone."""
    labels, inputs = call.arguments.get("labels"), call.inputs
    return (
        isinstance(labels, torch.Tensor)
        and isinstance(inputs, torch.Tensor)
        and not labels.is_floating_point()
        and labels.shape == inputs.shape[:2]
        and call.arguments.get("shift_labels") is None
        and call.model.proof.labels is None
        and bool(call.model.proof.source)
        and not call.wants_router_loss
    )


def _without_labels_behind_padding(call: Call) -> dict[str, Any]:
    """Return the arguments without labels that stock scores by what padding predicts, which the call leaves out."""
    found = dict(call.arguments)
    if not isinstance(call, PairCall) and call.entry.shifts_labels and call.declared.labelled_after_padding:
        real = torch.from_numpy(call.padding.real)
        behind = torch.nn.functional.pad(~real[:, :-1], (1, 0)) & real
        for name, hidden in (("labels", behind), ("shift_labels", ~real)):
            if isinstance(labels := found.get(name), torch.Tensor):
                found[name] = labels.masked_fill(hidden.to(labels.device), call.ignored_label)
    return found


def _gap_of_losses(found: torch.Tensor, alone: torch.Tensor) -> float:
    gap = (found - alone).abs().double() / max(1.0, float(alone.abs()))
    return float(gap.nan_to_num(math.inf, posinf=math.inf))


def error_by_token(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error at each token of two tensors (tokens, ...), relative to the deviation of `expected`: (tokens,).

    It is the root mean square over the channels of a token, in which rounding, other than leaked context, does not grow
    with their number. Infinite where one is no number and the other is. Of whole numbers it is 1 where they differ.
    """
    if not expected.is_floating_point():
        return (found != expected).reshape(len(expected), -1).any(1).double()
    errors = []
    for one, other in zip(chunks(found), chunks(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        errors.append((one - other).masked_fill_(same, 0.0).square_().mean(1).sqrt_())
    return torch.cat(errors).nan_to_num(math.inf, posinf=math.inf) / scale_of([expected])

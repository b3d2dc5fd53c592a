"""Compare a plain call with stock: packed rows with their last and first document alone, a padded batch with itself.

Code that moves no document when others are replaced may still number tokens by columns. A call is plain if its model
makes results for tokens, of text alone; of others the twin tells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autopack.auditing.compare import TOLERANCE, Fields, error_by_token, relative_error
from autopack.auditing.fields import Sides, fields_of
from autopack.auditing.running import forget_lengths
from autopack.calls.call import DROPPED, LAST_LOGITS, Call
from autopack.calls.encoder_decoder import PairCall
from autopack.calls.outputs import loss_of
from autopack.calls.sequence_parallel import exchange_of
from autopack.inspection import media, releases
from autopack.inspection.modules import row_dependent_rotaries
from autopack.inspection.randomness import state_of
from autopack.layout.forms import holds_tensors
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.runtime import scope
from autopack.watching.conditions import Difference, Runs, precisions, unnoticed
from autopack.watching.owners import CannotTell, sides_of
from autopack.watching.replaced import routes
from autopack.watching.schedule import is_padded

_TOLERANCE = {**TOLERANCE, torch.float64: 1e-5}
"""A good part of the models in float64 casts to float32 in code of its own."""
_LOSS_TOLERANCE = 1e-3
"""Of losses, where it is not larger for results."""
_OTHER_CHOICES = 0.1
"""Share of tokens that may have another whole number, such as that of their likeliest class, by rounding."""
_OTHER_EXPERTS = 0.1
"""Median error of tokens up to which rounding may have chosen other experts for a few of them."""
_TOGETHER = 3
"""Runs of each rank that gathers parameters together with others: the first as its call came, then those of stock."""
_ITEMS = "num_items_in_batch"
_NOT_ALONE = {*DROPPED, *LAYOUT_KWARGS, *LAST_LOGITS, "position_ids", _ITEMS}


def beside_stock(call: Call, losses: bool = False, packs: bool = True, together: bool = False) -> Difference:
    """Return the largest difference of a call to what stock gives. Raises `CannotTell`.

    Of packed rows these are the last and the first document alone, with `losses` their losses too, for which the call
    runs with the labels of one document; of a padded batch without its padding it is the batch. Of ranks that gather
    parameters `together` each runs equally often, whatever it has, also where its call does not pack.
    """
    with unnoticed(call), precisions() as dtypes:
        compared = _Compared(call)
        try:
            if not packs:
                raise CannotTell("the call packed nothing")
            compare = compared.padded if is_padded(call) else compared.packed
            arguments, found = compare(losses)
        finally:
            if together:
                compared.fill_up()
        worst = compared.worst(dtypes)
        if worst.excess > 1 and not together and compared.runs.moved(worst.name, found, arguments) > 1:
            raise CannotTell(f"{worst.name} is another one in each run")
        return worst


class _Compared:
    """Fields of a call beside those of stock."""

    def __init__(self, call: Call):
        self._call, self.runs = call, Runs(call)
        self._found: list[tuple[str, torch.Tensor, bool, int]] = []
        self._losses: list[tuple[float, int]] = []

    def packed(self, losses: bool) -> tuple[dict[str, Any], Fields]:
        """Compare the last and the first document of packed rows; return the call's arguments and its results."""
        call, sides = self._call, _sides_of_packed(self._call)
        found = self.runs.fields(call.arguments)
        for number in dict.fromkeys((sides.count - 1, 0)):
            before = state_of(call.module)
            alone = self._stock(_cut(call, sides, number))
            if state_of(call.module) != before:
                raise CannotTell("its forward draws random numbers that autopack cannot switch off")
            for name, value in fields_of(alone).items():
                pair = sides.beside(name, found[name], number, value) if name in found else None
                if pair is not None:
                    self._add(name, *pair, number)
            if losses and _has_a_loss_of_its_own(call):
                labels = call.arguments["labels"]
                kept = torch.from_numpy(sides.halves[0].owner == number).to(labels.device)
                given = {name: value for name, value in call.arguments.items() if name != _ITEMS}
                given["labels"] = labels.masked_fill(~kept, call.ignored_label)
                self._add_loss(self.runs(given), alone, number)
        return call.arguments, found

    def padded(self, losses: bool) -> tuple[dict[str, Any], Fields]:
        """Compare a padded batch with itself; return its arguments, as stock gets them, and its results."""
        call = self._call
        if call.model.traits.counts_images and media.given(call.arguments):
            raise CannotTell("stock numbers its images by rows")
        _refuse_exchanges(call)
        if not _strips(call):
            raise CannotTell("what stock gives depends on where padding stands")
        sides, arguments = sides_of(call), _without_labels_behind_padding(call)
        output, wanted = self.runs(arguments), self._stock(arguments)
        found, everybody = fields_of(output), np.ones(sides.count, dtype=bool)
        for name, value in fields_of(wanted).items():
            if name in found:
                one, other = (sides.part(name, each, everybody) for each in (found[name], value))
                if one is None or other is None:  # what is nobody's
                    one, other = found[name].reshape(1, -1), value.reshape(1, -1)
                self._add(name, one, other, 0)
        self._add_loss(output, wanted, 0)
        return arguments, found

    def fill_up(self) -> None:
        """Run the call until each kind of run was made as often as on other ranks."""
        self.runs.fill_up(1)
        self.runs.fill_up(_TOGETHER, self._stock)

    def _stock(self, arguments: dict[str, Any]) -> Any:
        """Return stock's output of a call, whatever ran before it."""
        with scope.stock(self._call.model):
            forget_lengths(row_dependent_rotaries(self._call.module))
            try:
                return self.runs(arguments)
            except CannotTell:
                raise
            except Exception:  # of a row without its padding some types make no cache
                return self.runs({**arguments, "use_cache": False})

    def _add(self, name: str, one: torch.Tensor | None, other: torch.Tensor | None, number: int) -> None:
        if one is not None and other is not None and one.shape == other.shape and other.numel():
            self._found.append((name, error_by_token(one, other), other.is_floating_point(), number))

    def _add_loss(self, output: Any, wanted: Any, number: int) -> None:
        found, loss = loss_of(output), loss_of(wanted)
        if found is not None and loss is not None and bool(loss.isfinite()):
            self._losses.append((relative_error(found, loss, least=1.0), number))

    def worst(self, dtypes: set[torch.dtype]) -> Difference:
        """Return the part that differs the most, by its tolerance. Raises `CannotTell`."""
        tolerance = max((_TOLERANCE.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)
        found = [Difference("loss", gap, max(tolerance, _LOSS_TOLERANCE), number) for gap, number in self._losses]
        for name, errors, is_floating, number in self._found:
            error = float(errors.max())
            # A choice between two that are all but equal may go the other way by rounding, at a few tokens.
            error *= is_floating or float(errors.mean()) > _OTHER_CHOICES or len(errors) == 1
            if error > tolerance and routes(self._call.module) and float(errors.median()) <= _OTHER_EXPERTS:
                raise CannotTell("rounding may have chosen other experts for some tokens")
            found.append(Difference(name, error, tolerance, number))
        if not found:
            raise CannotTell("no part of its output can be compared with what a document gets alone")
        return max(found, key=lambda each: each.excess)


def _sides_of_packed(call: Call) -> Sides:
    layout = None if isinstance(call, PairCall) else call.declared.layout
    if layout is None or call.entry.head is not None or media.given(call.arguments):
        raise CannotTell("it is no plain call of packed rows")
    _refuse_exchanges(call)
    if call.entry.uses_positions and not _counts_from_the_first(call, layout):
        raise CannotTell("its documents have positions of their own")
    return Sides(sides_of(call).halves[:1])


def _refuse_exchanges(call: Call) -> None:
    if exchange_of(call.model) is not None:
        raise CannotTell("stock's attention exchanges tokens with other ranks")


def _strips(call: Call) -> bool:
    """Return True if stock gives tokens of a padded batch what they get without the padding."""
    if isinstance(call, PairCall):  # by flash kernels upstream lets a decoder see the padding of its encoder
        return not any(map(releases.is_flash, call.model.implementations()))
    if call.declared.real is None:
        return True
    traits = call.model.traits
    reads = traits.recurs or traits.reads_padding or traits.counts_columns
    return not reads or (call.padding.on_the_right and not call.model.anatomy.has_row_dependent_rotary)


def _counts_from_the_first(call: Call, layout: PackedLayout) -> bool:
    starts = layout.first_positions
    real = slice(None) if layout.is_padding is None else ~layout.is_padding
    begins = starts is None or bool((starts[real] == call.entry.first_position).all())
    return begins and layout.largest_positions is None


def _cut(call: Call, sides: Sides, number: int) -> dict[str, Any]:
    """Return the arguments of one document alone. Raises `CannotTell`."""
    shape, (row, (first, end)) = sides.halves[0].owner.shape, sides.halves[0].place_of(number)
    found: dict[str, Any] = {}
    for name, value in call.arguments.items():
        counted = name == "position_ids" and call.entry.uses_positions and getattr(value, "ndim", 0) == 2
        if name in _NOT_ALONE and not counted:
            continue
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            if value.shape[:2] not in (shape, (1, shape[1])):
                raise CannotTell(f"what of {name} belongs to which document is not known")
            value = value.expand(shape[0], *value.shape[1:])[row : row + 1, first:end]
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

"""The real tokens of a padded batch as one packed row, and the backbone of a call alone as one.

A causal language model is unpadded at the top, so that head and loss see real tokens only. Any
other head gets the usual padded form, from a backbone that ran on the packed row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopack.calls import outputs, refusals
from autopack.calls.call import Call
from autopack.calls.outputs import restore
from autopack.calls.rows import RowsPlan, add_token_types, gathered, without_what_packing_drops
from autopack.layout.forms import Frame
from autopack.layout.host import upload
from autopack.layout.packed import rows_as_documents
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import Of
from autopack.runtime import scope as scopes
from autopack.runtime.scope import Activation, Scope
from autopack.runtime.tally import Tally, Volume

_LABELS_BEHIND_PADDING = (
    "tokens right behind padding have labels in a padded batch of %s (padding on the left, or a "
    "hole in the mask). Stock scores them by what it predicts at padding. autopack leaves these "
    "terms out, so losses differ from a run without it. Pad on the right or set these labels to "
    "-100, and both agree; unpad=False keeps stock's loss."
)


class Unpadded(RowsPlan):
    """Plan that runs a padded batch's real tokens as one packed row, common beginnings once."""

    what = "runs without its padding, as one packed row"
    unpads = True
    way: TokenMap

    def __init__(self, call: Call):
        padding, once = call.padding, call.prefixes
        real, volume = padding.real, None
        if call.of_head is None:
            self.volume_apart = Volume.of_row(len(real), real)
            volume = Volume.of_row(len(real), real, saved=0 if once is None else once.saved)
        layout = rows_as_documents(real, padding.device, call.declared.positions)
        arguments = _in_one_row(call, padding)
        add_token_types(call, arguments, layout)
        scope = Scope(call.model, layout, as_batch=call.of_head is None)
        self.way = padding
        of_row = scope if once is None else replace(scope, layout=once.documents, prefixes=once)
        if once is not None and not call.has_labels:  # of which every row has its own
            self.way = TokenMap.of_real(real, padding.device, once.columns)
            scope, arguments = of_row, gathered(arguments, once.row)
        elif once is not None and call.entry.holds_models:
            self.inside = of_row, once.row
        super().__init__(call, "its mask hides padding", scope, arguments, volume)

    def count(self, tally: Tally) -> None:
        """Count a batch that runs without padding, and warn of labels that leave its loss."""
        super().count(tally)
        if self.call.entry.shifts_labels and self.call.declared.labelled_after_padding:
            self.call.say_once(_LABELS_BEHIND_PADDING, self.call.name)
            tally.after_padding += 1

    @torch._dynamo.disable
    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        return self._restored(ended, module, output, self.way, self._as_it_came)

    def _as_it_came(self, ended: Activation, module: nn.Module) -> Any:
        """Return the output of the batch run with its padding, and correct the counts."""
        call, tally = self.call, self.scope.model.tally
        refusals.check_documents_can_stay_padded(call, outputs.ONE_PER_ROW)
        assert self.volume is not None
        tally.unpadded = tally.unpadded.minus(self.volume)
        call.count(call.volume, instead_of=ended.volume)
        tally.left[outputs.ONE_PER_ROW] += 1
        with scopes.stock(self.scope.model):
            return module.forward(**call.arguments)

    def rows_for_pooler(self, states: torch.Tensor) -> torch.Tensor:
        """Return a packed row's states in the rows and columns of the padded batch."""
        return self.way.restore(states)


class Inside(RowsPlan):
    """Plan of a backbone in a planned call that runs as a row without repeated tokens or padding.

    Head and loss get every token of every document, as usual.
    """

    what = "runs as one row, in which nothing is computed twice"

    def __init__(self, call: Call, scope: Scope, way: TokenMap):
        self.way = way
        reason = "the head or the loss around it is of every token of every document"
        super().__init__(call, reason, scope, gathered(call.arguments, way))

    @classmethod
    def at(cls, call: Call, outer: Activation) -> Inside | None:
        """Return the plan of a backbone's call inside `outer`; None if it cannot be one row."""
        if call.entry.holds_models or outer.scope.layout is None:
            return None
        scope, way = outer.plan.inside
        frame = Frame(*way.shape)
        units = [frame.unit_of(name, value) for name, value in call.arguments.items()]
        if call.inputs is None or tuple(call.inputs.shape[:2]) != way.shape or Of.UNKNOWN in units:
            return None
        return cls(call, scope, way)

    @torch._dynamo.disable
    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        return restore(output, self.way, pooled=False)


def _in_one_row(call: Call, padding: TokenMap) -> dict[str, Any]:
    """Return a padded batch's arguments gathered into one packed row, with the batch's positions.

    If the loss shifts, a token without a real token right before it gets no label: its prediction
    would have been made at padding.
    """
    arguments = gathered(without_what_packing_drops(call, call.arguments), padding)
    traits = call.traits
    if traits.uses_positions and arguments.get("position_ids") is None:
        mask = upload(padding.real, padding.device)
        if traits.recurs:  # a recurrence starts with its document, wherever the batch has it
            found = mask.long().cumsum(1) - 1
        else:
            found = call.entry.numbering.in_padded_batch(
                call.config, mask, call.arguments.get("input_ids")
            )
        arguments["position_ids"] = padding.gather(found)
    labels = arguments.get("labels")
    if call.entry.shifts_labels and labels is not None:
        at = upload(padding.unpredicted, labels.device)
        arguments["labels"] = labels.index_fill(1, at, call.ignored_label)
    return arguments

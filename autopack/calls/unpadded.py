"""A padded batch run as one packed row of its real tokens; its outputs return in the batch's form.

A causal language model is unpadded at the top, so that head and loss see real tokens only. Any
other head gets the usual padded form, from a backbone that ran on the packed row.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from autopack.calls import per_row_outputs
from autopack.calls.call import DROPPED, Call
from autopack.calls.outputs import restore
from autopack.calls.packed import add_token_types, without_what_packing_drops
from autopack.calls.plan import Plan
from autopack.errors import UnsupportedModel
from autopack.inspection import media
from autopack.layout.forms import Form, Frame, Of
from autopack.layout.packed import rows_as_documents
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.runtime.scope import Scope, stock
from autopack.runtime.tally import Tally, Volume

logger = logging.getLogger(__name__)
_NOT_IN_ROWS = {*DROPPED, *LAYOUT_KWARGS}
"""Arguments that the packed row does not get."""


class Unpadded(Plan):
    """The real tokens of a padded batch as one packed row."""

    what = "runs without its padding, as one packed row"
    reason = "its mask hides padding"
    packs = True

    def __init__(self, call: Call):
        self.padding, self.call = call.padding, call
        real = self.padding.real
        shared = once = call.prefixes
        if once is not None and call.has_labels:  # of which every row has its own
            shared, once = None, once if call.entry.inner else None
            if once is not None:
                self.prefixes_inside = once, once.row
        if call.documents is None:
            self.volume_apart = Volume.of_row(len(real), real)
            self.volume = Volume.of_row(len(real), real, saved=0 if once is None else once.saved)
        else:
            call.documents.unpadded = True
        layout = rows_as_documents(real, self.padding.device, call.declared.positions)
        if shared is not None:
            self.padding = TokenMap.of_shared(real, shared.columns, self.padding.device)
        self.arguments = without_what_packing_drops(call, _gathered(call, self.padding))
        add_token_types(call, self.arguments, layout)
        if shared is not None and "token_type_ids" in self.arguments and "token_type_ids" not in call.arguments:
            self.arguments["token_type_ids"] = self.arguments["token_type_ids"].index_select(1, shared.row.where[0])
        super().__init__(Scope(call.model, layout, as_batch=call.documents is None, prefixes=shared))

    def count(self, tally: Tally) -> None:
        if self.call.documents is None:
            tally.count(self.padding.real)
        if self.call.entry.shifts_labels and self.call.declared.labelled_after_padding:
            if not tally.after_padding and not self.call.model.is_silent:
                logger.warning(
                    "tokens right behind padding have labels in a padded batch of %s (padding on the left, or a hole "
                    "in the mask). Stock scores them by what it predicts at padding. autopack leaves these terms out, "
                    "so losses differ from a run without it. Pad on the right or set these labels to -100, and both "
                    "agree; unpad=False keeps stock's loss.",
                    self.call.name,
                )
            tally.after_padding += 1
        self.call.ran_without_padding()

    @torch._dynamo.disable
    def finish(self, module: nn.Module, output: Any) -> Any:
        most = 2 if media.given(self.call.arguments) else 9  # images may be as many as rows
        names = per_row_outputs.of_each_row(output, 1, self.padding.tokens, self.call.model.widths, most)
        if not names or (self.pooled and len(self.padding.real) == 1):
            return restore(output, self.padding, self.pooled, self.call.model.padding_read)
        if self.call.documents is not None:
            raise UnsupportedModel(
                f"{self.call.name}: {per_row_outputs.REASON}, and {self.call.documents.head} reads it, so documents "
                f"of packed rows cannot be run without padding. Run them one per row.",
                code="result-per-row",
            )
        model, level = self.call.model, self.call.entry.level
        per_row_outputs.remember(model, level, output, names, self.padding.tokens)
        model.tally.count(self.padding.real, batches=-1)
        self.call.count(self.call.volume, instead_of=self.volume)
        model.tally.left[per_row_outputs.REASON] += 1
        with stock(model):
            return module.forward(**self.call.arguments)

    def rows_for_pooler(self, states: torch.Tensor) -> torch.Tensor:
        return self.padding.restore(states)


def _gathered(call: Call, padding: TokenMap) -> dict[str, Any]:
    """Return the packed row's arguments: values per token are gathered, positions the batch's.

    If the loss shifts, a token without a real token right before it gets no label: its prediction
    would have been made at padding.
    """
    frame = Frame(*padding.shape)
    arguments = dict(call.arguments)
    for name, value in call.arguments.items():
        form = _form_of(name, value, frame)
        if form.of is Of.TOKEN:
            arguments[name] = frame.each(value, form, padding.gather)
    arguments.update(row_sizes(arguments, padding))
    traits = call.model.traits
    if traits.uses_positions and arguments.get("position_ids") is None:
        mask = torch.from_numpy(padding.real).to(padding.device)
        if traits.recurs:  # a recurrence starts with its document, wherever the batch has it
            found = mask.long().cumsum(1) - 1
        else:
            ids = call.arguments.get("input_ids")
            found = call.entry.numbering.in_padded_batch(call.config, mask, ids)
        arguments["position_ids"] = padding.gather(found)
    labels = arguments.get("labels")
    if call.entry.shifts_labels and labels is not None:
        at = torch.from_numpy(padding.unpredicted).to(labels.device)
        arguments["labels"] = labels.index_fill(1, at, call.ignored_label)
    return arguments


def row_sizes(arguments: dict[str, Any], padding: TokenMap) -> dict[str, int]:
    """Return the row's shape, if a head hands on the batch's (ModernBERT's, for inner masks)."""
    sizes = {"batch_size": (padding.shape[0], 1), "seq_len": (padding.shape[1], padding.tokens)}
    return {
        name: of_row
        for name, (of_batch, of_row) in sizes.items()
        if isinstance(arguments.get(name), int) and arguments[name] == of_batch
    }


def has_a_place(name: str, value: Any, padding: TokenMap) -> bool:
    """Return True if a padded batch's argument has a known form in the packed row."""
    if isinstance(value, list | tuple) and len(value) == padding.shape[0]:
        return False  # a word or number for each row
    return _form_of(name, value, Frame(*padding.shape)).of in (Of.TOKEN, Of.CALL)


def _form_of(name: str, value: Any, frame: Frame) -> Form:
    if name in _NOT_IN_ROWS:
        return Form(Of.CALL)
    if isinstance(value, torch.Tensor) and media.holds_media(name):
        return Form(Of.UNKNOWN)
    return frame.form_of(name, value)

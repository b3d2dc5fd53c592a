"""Packed rows of a call: no mask, no cache, restarting positions; a padded batch as one of them.

A causal language model is unpadded at the top, so that head and loss see real tokens only. Any
other head gets the usual padded form, from a backbone that ran on the packed row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopack.calls import outputs, refusals
from autopack.calls.call import DROPPED, Call, CallPlan
from autopack.calls.with_media import images_of_documents, positions_of_documents
from autopack.errors import UnsupportedModel
from autopack.inspection import media
from autopack.layout.forms import Frame
from autopack.layout.host import upload
from autopack.layout.packed import (
    PackedLayout,
    real_documents,
    real_tokens,
    rows_as_documents,
    without_boundaries,
)
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import LAYOUT_KWARGS, Of
from autopack.runtime import scope as scopes
from autopack.runtime.scope import Activation, Scope
from autopack.runtime.tally import Tally, Volume

_LEAST_PADDING = 0.1
"""Share of the columns of packed rows from which their padding is taken out before they run."""
_LABELS_BEHIND_PADDING = (
    "tokens right behind padding have labels in a padded batch of %s (padding on the left, or a "
    "hole in the mask). Stock scores them by what it predicts at padding. autopack leaves these "
    "terms out, so losses differ from a run without it. Pad on the right or set these labels to "
    "-100, and both agree; unpad=False keeps stock's loss."
)
NOT_IN_ROWS = {*DROPPED, *LAYOUT_KWARGS}
"""Arguments that the packed row of a padded batch does not get."""


class RowsPlan(CallPlan):
    """Plan of a call that runs packed rows: its own, or one row of its tokens, mapped by `way`."""

    what = "runs as packed rows, each document by itself"
    packs = True
    way: TokenMap | None = None
    """The map of the call's tokens into the row that runs, if that is another one."""

    def __init__(self, call: Call, *given: Any):
        super().__init__(call, *given)
        # Some logits, and images, may be as many as rows. Asked here, since no trace reads a
        # property that is kept.
        most = 2 if call.media or call.wants_last_logits else 9
        self._sizes = call.model.widths, most
        """The last two arguments of `of_each_row`."""

    def _run_as_it_came(self, ended: Activation, module: nn.Module) -> Any:
        """Run the call again as it came, with the tokens that were left out; return its output."""
        raise NotImplementedError

    @torch._dynamo.disable
    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Return the output in the call's rows; of a second run, as it came, if it is per row."""
        model, way = self.scope.model, self.way
        assert way is not None
        names = of_each_row(output, *way.into, *self._sizes)
        if not names or (ended.pooled and len(way.real) == 1):
            return outputs.restore(output, way, ended.pooled, model.padding_read)
        results = [outputs.parts_of(output)[name] for name in names]
        # else sizes may coincide
        if any(result.dim() == 1 or result.shape[1] != way.tokens for result in results):
            model.pooling.add(self.call.entry.level)
        return self._run_as_it_came(ended, module)


class Packed(RowsPlan):
    """Plan that runs a call's packed rows, if possible without padding and repeated tokens."""

    def __init__(self, call: Call, layout: PackedLayout):
        once, entry = call.prefixes, call.entry
        positions = (
            positions_of_documents(call, layout) if call.media and entry.uses_positions else None
        )
        arguments = arguments_of_rows(call, layout, positions)
        if entry.shifts_labels:
            for name in ("labels", "shift_labels"):
                if isinstance(labels := arguments.get(name), Tensor):
                    arguments[name] = without_boundaries(
                        labels, layout, name == "shift_labels", call.ignored_label
                    )
        images = images_of_documents(call, layout) if call.media else None
        self.layout, self._as_rows = layout, arguments
        of_row = self._scope_of_rows = Scope(
            call.model, layout, images=images, want_weights=call.wants_weights
        )
        volume = self.volume_apart = Volume.of_layout(layout)
        way = None
        if once is not None:
            real = real_tokens(layout)
            way = TokenMap.of_real(real, once.device, once.columns)
            of_row = replace(of_row, layout=once.documents, prefixes=once)
            volume = Volume.of_row(len(once.documents.lengths), real, saved=once.saved)
        elif (
            layout.is_padding is not None
            and (way := _padding_to_take_out(call, layout, arguments)) is not None
        ):
            of_row, volume = (
                replace(of_row, layout=layout.without_padding()),
                volume.without_padding(),
            )
        elif layout.is_padding is not None and entry.holds_models and call.wants_router_loss:
            self.masks = True  # the loss of routers is over tokens alone, and finds them by it
            arguments["attention_mask"] = (call.arguments["attention_mask"] != 0).long()
        # A head on all tokens gets those of every document.
        of_every = entry.foreign or entry.has_other_head or call.wants_last_logits
        of_every = of_every or (once is not None and call.has_labels)
        scope = self._scope_of_rows
        if way is not None and entry.holds_models and of_every:
            self.inside = of_row, way
        elif way is not None:
            self.way, scope, arguments = way, of_row, gathered(arguments, way)
        super().__init__(call, "it declares documents", scope, arguments, volume)

    def _run_as_it_came(self, ended: Activation, module: nn.Module) -> Any:
        """Run the packed rows again, padding and repeated tokens included; return the output."""
        self.leave_apart(ended)
        with scopes.in_force(self._scope_of_rows, self.call.entry.level):
            return module.forward(**self._as_rows)

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Return the output in the call's rows, with results per document; None if it stays."""
        layout, restored = self.layout, None
        if self.way is not None:
            output = restored = super().finish(ended, module, output)
        names = of_each_row(output, layout.rows, layout.columns, *self._sizes)
        if not names or (ended.pooled and real_documents(layout).sum() == layout.rows):
            return restored
        return outputs.with_documents_alone(
            self.scope.model, module, self._as_rows, layout, output, names
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
        arguments = _arguments_in_one_row(call, padding)
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

    def _run_as_it_came(self, ended: Activation, module: nn.Module) -> Any:
        """Run the batch with its padding, correct the counts, return the output; or raise."""
        call, tally = self.call, self.scope.model.tally
        refusals.check_documents_can_stay_padded(call, outputs.ONE_PER_ROW)
        assert self.volume is not None
        tally.unpadded = tally.unpadded.minus(self.volume)
        call.count(call.volume, instead_of=ended.volume)
        tally.left[outputs.ONE_PER_ROW] += 1
        with scopes.stock(self.scope.model):
            return module.forward(**call.arguments)

    def rows_for_pooler(self, states: Tensor) -> Tensor:
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
        """Return the plan to run a call as the row `outer.plan.inside`; None if it does not fit."""
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
        """Return the backbone's output in the rows and columns of the call around it."""
        return outputs.restore(output, self.way, pooled=False)


def of_each_row(
    output: Any, rows: int, columns: int, widths: frozenset[int], most: int = 9
) -> list[Any]:
    """Return names or indices of the output's tensors whose shapes may mean one result per row.

    `widths` are the sizes of the model's vectors: a tensor (R, C) with such a size may be vectors
    of rows. Tensors with more than `most` dimensions do not count, nor do a loss and the parts of
    tuples, which have one for each layer.
    """
    found = []
    parts = output if isinstance(output, Mapping) else outputs.parts_of(output)
    for name, value in parts.items():
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or not 0 < value.dim() <= most
        ):
            continue
        # Predictions of the next token are one fewer than columns; vectors may be as many by
        # chance.
        per_token = value.dim() > 1 and value.shape[1] in (columns, columns - 1)
        is_vectors = value.dim() == 2 and value.shape[1] in widths
        if name != "loss" and len(value) == rows and (is_vectors or not per_token):
            found.append(name)
    return found


def _padding_to_take_out(
    call: Call, layout: PackedLayout, arguments: dict[str, Any]
) -> TokenMap | None:
    """Return the map of packed rows' real tokens into one row, or None if their padding stays.

    It stays where it is little, where a fixed shape was asked for, and where code outside may read
    it.
    """
    real, entry = real_tokens(layout), call.entry
    stays = (
        layout.slots is not None
        or not call.model.options.unpad
        or bool(call.model.chunk_sizes - {1})
    )
    little = stays or real.sum() > (1 - _LEAST_PADDING) * real.size or not real.any()
    read = call.model.padding_read
    # by a loss outside of the model, perhaps
    reads = torch.is_grad_enabled() and not call.has_labels
    # a third-party forward or loss may, too
    reads |= bool(read and read.where) or bool(entry.foreign)
    of_columns = call.wants_last_logits or entry.has_other_head  # of every column of the rows
    # where no model inside runs the row
    of_columns = of_columns and (call.wants_router_loss or not entry.holds_models)
    per_row = entry.has_pooler or entry.head is not None or entry.level in call.model.pooling
    if little or reads or of_columns or per_row or call.media or call.wants_weights:
        return None
    way = layout.derived("without padding", lambda: TokenMap.of_real(real, layout.device))
    return way if all(has_a_place(name, value, way) for name, value in arguments.items()) else None


def gathered(arguments: dict[str, Any], way: TokenMap) -> dict[str, Any]:
    """Return arguments with values per token gathered into the row of `way`; others unchanged."""
    frame = Frame(*way.shape)
    return {
        n: v if is_media(n, v) else frame.changed(n, v, way.gather) for n, v in arguments.items()
    }


def has_a_place(name: str, value: Any, padding: TokenMap) -> bool:
    """Return True if an argument of a padded batch can be moved into a packed row or dropped."""
    if isinstance(value, list | tuple) and len(value) == padding.shape[0]:
        return False  # a word or number for each row
    if name in NOT_IN_ROWS:
        return True
    return (
        not is_media(name, value) and Frame(*padding.shape).unit_of(name, value) is not Of.UNKNOWN
    )


def is_media(name: str, value: Any) -> bool:
    """Return True for a tensor of images or sounds, whose shape does not tell its documents."""
    return isinstance(value, Tensor) and media.holds_media(name)


def without_what_packing_drops(call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without declarations of documents, masks and caches set to None."""
    entry = call.entry
    kept = arguments | dict.fromkeys(call.given.intersection(DROPPED))
    for name in LAYOUT_KWARGS if entry.uses_positions else ("position_ids", *LAYOUT_KWARGS):
        kept.pop(name, None)
    if "attention_mask" in entry.names:
        # in all calls, whether they bring one or not: compiled code counts arguments
        kept["attention_mask"] = None
    # T5Gemma's encoder-decoder hands its own on, beside those that it does not name.
    by_others = entry.takes_others and not entry.is_pair
    by_others = by_others and getattr(call.config, "use_cache", False)
    # An encoder has no cache, whatever its configuration says (T5Gemma up to 4.53 hands all others
    # on beside its own).
    if "use_cache" in entry.names or (by_others and entry.decodes is not False):
        kept["use_cache"] = False
    return kept


def _add_positions(call: Call, arguments: dict[str, Any], layout: PackedLayout) -> None:
    """Set positions that restart per document, if needed and missing; raise if none are taken."""
    if not call.entry.uses_positions or arguments.get("position_ids") is not None:
        return
    if not call.entry.takes_positions:
        raise UnsupportedModel(
            f"{call.name}.forward takes no position_ids, so positions cannot restart at each "
            "document. Run the documents one per row, or register a family that restarts them "
            "(docs/families.md).",
            code="positions-cannot-restart",
        )
    numbering, ids = call.entry.numbering, arguments.get("input_ids")
    counted = numbering.of_counted(call.config, ids, layout.start_columns)
    first = call.entry.first_position
    arguments["position_ids"] = layout.position_ids(first) if counted is None else counted


def add_token_types(call: Call, arguments: dict[str, Any], layout: PackedLayout) -> None:
    """Put token types into the dict if rows are longer than the model's buffer of them.

    Its forward would take as many of them as the row has columns. All tokens may run as one row.
    """
    if "token_type_ids" not in call.entry.names or arguments.get("token_type_ids") is not None:
        return
    buffers = (module._buffers.get("token_type_ids") for module in call.module.modules())
    kinds = next((buffer for buffer in buffers if buffer is not None), None)
    if kinds is not None and layout.max_seqlen <= kinds.shape[-1] < layout.rows * layout.columns:
        places = layout.derived("places", layout.position_ids).to(kinds.device)
        arguments["token_type_ids"] = kinds.reshape(-1, kinds.shape[-1])[0][places]


def arguments_of_rows(
    call: Call, layout: PackedLayout, positions: Tensor | None = None
) -> dict[str, Any]:
    """Return a call's arguments for packed rows, with missing positions and token types added.

    `positions` are those that the model has computed itself, if it has. Raises `UnsupportedModel`
    if positions have to restart and the forward takes none.
    """
    arguments = without_what_packing_drops(call, call.arguments)
    if positions is not None:
        arguments["position_ids"] = positions
    _add_positions(call, arguments, layout)
    add_token_types(call, arguments, layout)
    return arguments


def _arguments_in_one_row(call: Call, padding: TokenMap) -> dict[str, Any]:
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

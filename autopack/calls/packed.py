"""Packed rows, normalised: no mask, no cache, restarting positions, no label at boundaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopack.calls import per_row_outputs
from autopack.calls.call import DROPPED, Call
from autopack.calls.entry import Entry
from autopack.calls.outputs import restore
from autopack.calls.plan import Plan
from autopack.calls.with_media import images_of_documents, positions_of_documents
from autopack.errors import UnsupportedModel
from autopack.inspection import media
from autopack.layout.forms import Frame, Of
from autopack.layout.packed import PackedLayout, real_documents, real_tokens, without_boundaries
from autopack.layout.prefixes import Prefixes
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.runtime import scope as scopes
from autopack.runtime.scope import Activation, Scope
from autopack.runtime.tally import Volume


class Packed(Plan):
    """Packed rows that run as they are."""

    what = "runs as packed rows, each document by itself"
    reason = "it declares documents"
    packs = True

    def __init__(self, call: Call, layout: PackedLayout):
        self.labelled = call.has_labels
        self.volume = self.volume_apart = Volume.of_layout(layout)
        arguments = without_what_packing_drops(call, call.arguments)
        if call.entry.uses_positions:
            models, counts_images = [call.module, *call.entry.inner], call.model.traits.counts_images
            computed = positions_of_documents(models, call.arguments, layout, counts_images)
            arguments |= {} if computed is None else {"position_ids": computed}
        once = call.prefixes
        add_positions(call, arguments, layout)
        add_token_types(call, arguments, layout, 0 if once is None else once.tokens)
        if call.entry.shifts_labels:
            for name in ("labels", "shift_labels"):
                if isinstance(labels := arguments.get(name), torch.Tensor):
                    arguments[name] = without_boundaries(labels, layout, name == "shift_labels", call.ignored_label)
        self.masks = layout.is_padding is not None and bool(call.entry.inner) and call.wants_router_loss
        if self.masks:  # the loss of routers is over tokens alone, and finds them by it
            arguments["attention_mask"] = (call.arguments["attention_mask"] != 0).long()
        self.arguments = self._as_rows = arguments
        self.layout = layout
        self.most = 2 if call.wants_last_logits or media.given(arguments) else 9
        """Most dimensions of a per-row output: some logits, and images, may be as many as rows."""
        images = images_of_documents(call, layout)
        self._scope_of_rows = Scope(call.model, layout, images=images, want_weights=call.wants_weights)
        self._once: TokenMap | None = None
        """The mapping to the row that runs, if it holds common beginnings once."""
        super().__init__(self._scope_of_rows if once is None else self._taken_together(call, once))

    def _taken_together(self, call: Call, once: Prefixes) -> Scope:
        """Compute common beginnings once: here, or in the inner model for heads on all tokens."""
        real = real_tokens(self.layout)
        padding = TokenMap.of_shared(real, once.columns, once.device)
        self.volume = Volume.of_row(len(once.documents.lengths), real, saved=once.saved)
        entry = call.entry
        if entry.inner and (self.labelled or call.wants_last_logits or entry.foreign or entry.has_other_head):
            self.prefixes_inside = once, padding
            return self._scope_of_rows
        self._once, self.arguments = padding, _gathered(self._as_rows, padding)
        return replace(self._scope_of_rows, layout=once.documents, prefixes=once)

    @torch._dynamo.disable
    def _restored(self, module: nn.Module, output: Any) -> Any:
        """Return the output of the row that ran, as packed rows."""
        assert self._once is not None
        model, level = self.scope.model, self.call.entry.level
        names = per_row_outputs.of_each_row(output, 1, self._once.tokens, model.widths, self.most)
        if not names:
            return restore(output, self._once, pooled=False)
        per_row_outputs.remember(model, level, output, names, self._once.tokens)
        self.leave_apart()
        with scopes.in_force(self._scope_of_rows, level):
            return module.forward(**self._as_rows)

    def finish(self, module: nn.Module, output: Any) -> Any:
        model, layout, restored = self.scope.model, self.layout, None
        if self._once is not None:
            output = restored = self._restored(module, output)
        names = per_row_outputs.of_each_row(output, layout.rows, layout.columns, model.widths, self.most)
        if not names or (self.pooled and real_documents(layout).sum() == layout.rows):
            return restored
        return per_row_outputs.of_documents(model, module, self._as_rows, layout, output, names)


class PrefixesInside(Plan):
    """The backbone of a call with the model's own loss: it alone computes common beginnings once.

    Labels differ where documents part, so head and loss get every token of every document, as
    usual.
    """

    what = "runs what its documents begin with once"
    reason = "the loss of the model around it is of every token of every document"

    def __init__(self, call: Call, scope: Scope, once: Prefixes, padding: TokenMap):
        self._padding, self.arguments = padding, _gathered(call.arguments, padding)
        super().__init__(replace(scope, layout=once.documents, prefixes=once))

    @classmethod
    def at(cls, call: Call, outer: Activation) -> PrefixesInside | None:
        """Return the plan for a call inside a planned one that runs common beginnings once."""
        inside = None if outer.plan is None else outer.plan.prefixes_inside
        if inside is None or call.entry.inner or outer.scope.layout is None:
            return None
        once, padding = inside
        frame = Frame(*padding.shape)
        forms = [frame.form_of(name, value).of for name, value in call.arguments.items()]
        if call.inputs is None or tuple(call.inputs.shape[:2]) != padding.shape or Of.UNKNOWN in forms:
            return None
        return cls(call, outer.scope, once, padding)

    @torch._dynamo.disable
    def finish(self, module: nn.Module, output: Any) -> Any:
        return restore(output, self._padding, pooled=False)


def _gathered(arguments: dict[str, Any], padding: TokenMap) -> dict[str, Any]:
    """Return the arguments of the row that holds common beginnings once."""
    frame = Frame(*padding.shape)
    return {name: frame.changed(name, value, padding.gather) for name, value in arguments.items()}


def without_mask(
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return an inner model's arguments without the mask that its top has kept, or None."""
    place = entry.names.index("attention_mask") if "attention_mask" in entry.names else len(args)
    if place < len(args):
        return (*args[:place], None, *args[place + 1 :]), kwargs
    return None if kwargs.get("attention_mask") is None else (args, {**kwargs, "attention_mask": None})


def without_what_packing_drops(call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a packed row, without declarations, masks and caches."""
    entry = call.entry
    kept = {name: value for name, value in arguments.items() if name not in LAYOUT_KWARGS}
    if not entry.uses_positions:
        kept.pop("position_ids", None)
    kept.update(dict.fromkeys((name for name in DROPPED if kept.get(name) is not None), None))
    if "attention_mask" in entry.names:
        kept["attention_mask"] = None  # in all calls, whether they bring one or not: compiled code counts arguments
    by_others = entry.takes_others and getattr(call.config, "use_cache", False)
    # An encoder has no cache, whatever its configuration says (T5Gemma up to 4.53 hands all others on beside its own).
    if "use_cache" in entry.names or (by_others and call.model.anatomy.in_decoder(call.module) is not False):
        kept["use_cache"] = False
    return kept


def add_positions(call: Call, arguments: dict[str, Any], layout: PackedLayout) -> None:
    """Add positions that restart at every document, if needed and not in the call."""
    if not call.entry.uses_positions or arguments.get("position_ids") is not None:
        return
    if not call.entry.takes_positions:
        raise UnsupportedModel(
            f"{call.name}.forward takes no position_ids, so positions cannot restart at each document. Run the "
            f"documents one per row, or register a family that restarts them (docs/families.md).",
            code="positions-cannot-restart",
        )
    numbering, ids = call.entry.numbering, arguments.get("input_ids")
    counted = numbering.of_counted(call.config, ids, layout.start_columns)
    first = call.entry.first_position
    arguments["position_ids"] = layout.position_ids(first) if counted is None else counted


def add_token_types(call: Call, arguments: dict[str, Any], layout: PackedLayout, columns: int = 0) -> None:
    """Add token types to long rows from the model's buffer, which is as long as documents may be.

    Its forward would take as many of them as the row has columns; `columns` are the columns of a
    row that holds common beginnings once.
    """
    if "token_type_ids" not in call.entry.names or arguments.get("token_type_ids") is not None:
        return
    buffers = (module._buffers.get("token_type_ids") for module in call.module.modules())
    kinds = next((buffer for buffer in buffers if buffer is not None), None)
    if kinds is not None and layout.max_seqlen <= kinds.shape[-1] < max(layout.columns, columns):
        places = layout.derived("places", layout.position_ids).to(kinds.device)
        arguments["token_type_ids"] = kinds.reshape(-1, kinds.shape[-1])[0][places]


def inner_arguments(call: Call, layout: PackedLayout) -> dict[str, Any]:
    """Return the arguments of an inner model that third-party code called with packed rows."""
    arguments = without_what_packing_drops(call, call.arguments)
    add_positions(call, arguments, layout)
    add_token_types(call, arguments, layout)
    return arguments

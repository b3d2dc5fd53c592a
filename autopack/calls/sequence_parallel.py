"""Packed rows that several ranks share: each calls the model with its columns of every row.

Declarations are gathered from all ranks, so that every rank knows the documents of whole rows.
Attention exchanges tokens for heads (`autopack.attention.site`). Everything else in a model that
packs exactly by attention alone looks at one token at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopack.calls import refusals
from autopack.calls.call import Call
from autopack.calls.outputs import loss_of
from autopack.calls.rows import RowsPlan, arguments_of_rows
from autopack.errors import AutopackError, InvalidPacking, UnsupportedModel
from autopack.inspection import masks, releases, sharding
from autopack.inspection.foreign import original
from autopack.layout import declarations
from autopack.layout.forms import described
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import FLASH_KWARGS, PER_TOKEN
from autopack.runtime.marks import mark_of
from autopack.runtime.model import EnabledModel, in_a_group
from autopack.runtime.row_group import RowGroup
from autopack.runtime.scope import Activation, Scope
from autopack.runtime.tally import Volume

_WITHOUT = "Train it without sequence parallelism."


def rows_shared_by(call: Call) -> RowGroup | None:
    """Return the ranks that share a call's rows, by `enable` or DeepSpeed; None if none do."""
    model = call.model
    given = model.options.sequence_parallel
    if given is not None and not given.of_processes:
        return given
    if not in_a_group():
        return None
    exchange = exchange_of(model)
    if model.is_settling or (given is None and exchange is None):
        return None
    if given is not None:
        return given if given.ranks > 1 else None
    return (
        RowGroup(exchange.process_group)
        if sharding.exchanges_now(exchange, call.module.training)
        else None
    )


def exchange_of(model: EnabledModel) -> Any:
    """Put DeepSpeed's exchange of tokens for heads inside autopack's attention; return it, or None.

    It is the exchange at the model's attention, found also if it was registered after `enable`;
    None if there is none.
    """
    for name in model.implementations():
        function = releases.attention_function(name)
        exchange = sharding.exchange_of(function)
        if exchange is None:
            continue
        if original(function) is function:
            model.lease.renew(model.lease.needed)
            model.lease.follow(model.implementations())
        exchange.attn = original(exchange.attn)
        return exchange
    return None


class SharedRows(RowsPlan):
    """Plan of a call with one rank's columns of shared rows; all ranks make it, or raise.

    Raises `AutopackError`, on all ranks, if one of them cannot serve the call.
    """

    what = "runs as this rank's part of packed rows"
    why = "ranks share its rows"

    def __init__(self, call: Call, rows: RowGroup):
        layout, counted = _documents_of_whole_rows(call, rows)
        refusals.refuse(call, refusals.early_positions(call, layout))
        arguments = arguments_of_rows(call, layout)
        part = layout.columns // rows.ranks
        self.shape = (layout.rows, part)
        """Rows and columns of this rank's part."""
        mine = slice(rows.rank * part, (rows.rank + 1) * part)
        call.part = (layout, mine)
        for name in ("position_ids", "token_type_ids"):
            if arguments.get(name) is not None and name not in call.given:  # those of whole rows
                arguments[name] = arguments[name][:, mine].contiguous()
        self.targets: Tensor | None = None
        """The labels that the loss has to count; it would otherwise shift its own."""
        if counted is not None:
            last = layout.bounds[1:] - 1
            crossing = last[counted.reshape(-1)[last]]
            if len(crossing):
                row, column = divmod(int(crossing[0]), layout.columns)
                raise InvalidPacking(
                    f"shift_labels of rows that ranks share have a label at row {row}, column "
                    f"{column}, where a document ends: it would be compared with the first token "
                    f"of the next one. Set it to {call.ignored_label}, as "
                    "autopack.packing.shard_rows does, or set the labels of first tokens to it "
                    "before they are shifted, as autopack.PackingCollator does.",
                    code="parts-of-rows",
                )
            self.targets = arguments["shift_labels"] = arguments["shift_labels"].contiguous()
        super().__init__(
            call,
            self.why,
            Scope(call.model, layout, shared=rows),
            arguments,
            Volume.of_layout(layout),
        )

    def arguments_inside(self, call: Call) -> dict[str, Any]:
        """Return a foreign inner call's arguments at this part's positions; raise for others."""
        given, mine = call.arguments.get("position_ids"), (self.arguments or {}).get("position_ids")
        assert call.inputs is not None
        same = (
            given is None
            or mine is None
            or given is mine
            or torch.equal(given.expand_as(mine), mine)
        )
        if not same or call.inputs.shape[:2] != self.shape:
            raise UnsupportedModel(
                f"{call.name} was called inside a call of a part of rows that ranks share, with "
                f"other columns or positions than that call has. Pass the same on. {_WITHOUT}",
                code="call-within-call",
            )
        return (
            {**call.arguments, "position_ids": mine}
            if call.entry.uses_positions
            else dict(call.arguments)
        )

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Raise `UnsupportedModel` if a loss was not made of `shift_labels`; return None."""
        if self.targets is not None and not ended.met_loss and loss_of(output) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} computed its loss otherwise than from the shift_labels "
                "that it was given, so that the last token of a part has no label or a wrong one. "
                "Compute the loss from the logits and shift_labels.",
                code="loss-not-of-documents",
            )
        return None


def _documents_of_whole_rows(call: Call, rows: RowGroup) -> tuple[PackedLayout, np.ndarray | None]:
    """Gather the ranks' declarations; return the layout and counted labels (or None); or raise.

    A call that one rank cannot serve is refused on all of them, so that none waits for another.
    """
    refused: AutopackError | None = None
    tensors: dict[str, Tensor] = {}
    try:
        tensors = _declarations_of_part(call)
    except AutopackError as error:
        refused = error
    inputs = call.inputs
    device = torch.device("cpu") if inputs is None else inputs.device
    shape = (0, 0) if inputs is None else tuple(inputs.shape[:2])
    present = [name in tensors for name in (*PER_TOKEN, "shift_labels")]
    header = torch.tensor([refused is not None, *shape, *present], dtype=torch.long, device=device)
    said = host_values(rows.gather(header))
    if refused is not None:
        raise refused
    if said[:, 0].any():
        raise UnsupportedModel(
            f"{call.name} was called with parts of rows, and rank {int(said[:, 0].argmax())} of "
            "those that share them refused its own; its error says why.",
            code="sequence-parallel",
        )
    if (said != said[0]).any():
        raise InvalidPacking(
            f"all ranks that share rows must call {call.name} with equally many columns of the "
            "same rows and with the same arguments; found input_ids of "
            f"{[tuple(one) for one in said[:, 1:3].tolist()]}, and "
            f"{', '.join((*PER_TOKEN, 'shift_labels'))} given: {said[:, 3:].tolist()}. "
            "autopack.packing.shard_rows cuts rows like that.",
            code="parts-of-rows",
        )
    columns = shape[1] * rows.ranks
    whole: dict[str, Tensor] = {}
    if tensors:  # those of whole rows on the host: one exchange, one copy
        # (ranks, names, rows, part)
        parts = rows.gather(torch.stack([tensor.long() for tensor in tensors.values()]))
        values = torch.from_numpy(host_values(parts.movedim(0, 2).flatten(2)))
        whole = dict(zip(tensors, values, strict=True))
    counted = whole.pop("shift_labels", None)
    declared = declarations.read(
        whole,
        (shape[0], columns),
        torch.device("cpu"),
        call.traits.first_position,
        call.ignored_label,
    )
    layout = declared.layout
    if layout is None:
        if declared.jumps:
            raise InvalidPacking(
                "position_ids of rows that ranks share neither go on by one nor begin anew, so "
                f"autopack cannot tell where documents of {call.name} begin. Declare them by "
                "seq_idx as well.",
                code="documents-unclear",
            )
        layout = PackedLayout.of_padded(
            declared.real_of((shape[0], columns)), device, declared.positions
        )
    else:
        layout = layout.to(device)
    return layout, None if counted is None else host_values(counted).astype(bool)


def _why_not_in_parts(call: Call) -> str | None:
    """Return the reason why a call cannot run on parts of rows; None if it can."""
    model, entry = call.model, call.entry
    anatomy, traits = model.anatomy, model.traits
    if call.outer is not None:
        return "another call of the model is under way around it"
    if entry.is_pair or entry.is_half or entry.head is not None or entry.inner_head is not None:
        return "it is no model, or none with a head of its own, that has a result for each token"
    if anatomy.towers or traits.dense or not (anatomy.attention or anatomy.mixers):
        return "more than attention and layers that mix tokens looks at several tokens at a time"
    if traits.whole_model_reason is not None:
        return "its documents are run alone, and no rank would have less to do"
    marks = [mark_of(mixer) for mixer in anatomy.mixers]
    if any(mark is not None and mark.way is not None and not mark.way.in_parts for mark in marks):
        return "its own forward pads rows before its layers"
    if traits.adjusted:
        return "its queries are scaled by the columns that they stand in"
    if entry.reads_one_token_per_row or any(
        getattr(each, "pooler", None) is not None for each in anatomy.entries
    ):
        return "a pooler reads the first token of each document"
    if not masks.has_mask_interface():
        return (
            "this release of transformers makes masks that know nothing of other ranks (before "
            "4.53)"
        )
    if call.media:
        return "it was given images or other media"
    if call.wants_weights or call.wants_router_loss:
        return "attention weights or the loss of routers were asked for, which are of whole rows"
    if call.wants_last_logits:
        return "logits of the last tokens alone were asked for, which only one rank has"
    if call.inputs is None:
        return "it was given neither input_ids nor inputs_embeds"
    if not call.given.isdisjoint(FLASH_KWARGS):
        return (
            "cumulative lengths are of whole rows; position_ids or seq_idx declare documents of a "
            "part"
        )
    if entry.shifts_labels and "labels" in call.given and "shift_labels" not in call.given:
        return (
            "labels are shifted within each part; pass shift_labels too, as "
            "autopack.packing.shard_rows makes them"
        )
    unlabelled = call.given.isdisjoint(("labels", "shift_labels"))
    return model.ask_twin(
        "parts",
        "no" if unlabelled else "shifted" if entry.shifts_labels else "as they are",
    )


def _declarations_of_part(call: Call) -> dict[str, Tensor]:
    """Return this rank's declarations, and mask of counted labels, by name; raise if refused."""
    refusals.refuse(call)
    reason = _why_not_in_parts(call)
    if reason is not None:
        raise UnsupportedModel(
            f"{call.name} cannot be called with parts of rows that ranks share: {reason}. "
            f"{_WITHOUT}",
            code="sequence-parallel",
        )
    assert call.inputs is not None
    shape, found = tuple(call.inputs.shape[:2]), {}
    for name in (*PER_TOKEN, "shift_labels"):
        value = call.arguments.get(name)
        if value is None:
            continue
        if name == "position_ids" and isinstance(value, Tensor) and value.shape == (1, shape[1]):
            value = value.expand(shape)
        device = call.inputs.device
        if (
            not isinstance(value, Tensor)
            or value.is_floating_point()
            or value.shape != shape
            or value.device != device
        ):
            raise InvalidPacking(
                f"{name} of a part of rows must be a tensor of integers of its shape, {shape}, on "
                f"{device}; found {described(value)}",
                code="parts-of-rows",
            )
        found[name] = (value != call.ignored_label) if name == "shift_labels" else value
    return found

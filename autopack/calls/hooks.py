"""The way into an enabled model and out of it: forward hooks on the instance.

Hooks survive deepcopy, pickle, accelerate, DDP and PEFT, and leave the signature of `forward` as it is. The entry
decides what becomes of the call (`autopack.calls.choose`) and puts its scope in force; the exit ends it and gives the
output the form that the caller expects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopack.calls import refusals
from autopack.calls.call import Call
from autopack.calls.choose import choose, choose_pair
from autopack.calls.entry import Entry, Kind
from autopack.calls.halves import HalfAsRow
from autopack.calls.pairs import PairAsRows, PairCall
from autopack.calls.plan import Plan
from autopack.inspection.poolers import pool_documents, pools_single_tokens
from autopack.integrations import accelerate
from autopack.layout.batches import DocumentBatch
from autopack.runtime import scope as scopes
from autopack.runtime.checkpointing import bind_checkpointing
from autopack.runtime.model import EnabledModel, Link
from autopack.runtime.scope import Activation


class EntryHook:
    """Forward pre-hook of an enabled model and of each model inside it that takes tokens."""

    def __init__(self, entry: Entry):
        self.entry = entry

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self.entry
        model = entry.link.follow(module)
        if entry.kind is Kind.MODEL:
            running = scopes.of_model(model)
            # Compiled code cannot look at frames (see `current`), so only a first descent is trusted here; anything
            # else takes the slow path.
            if running is not None and running.deepest < entry.level and not _defers(running):
                running.enter(entry.level)
                return None
        return _enter(entry, module, args, kwargs)


class ExitHook:
    """Forward hook of the same models: ends what the entry began, also after an error."""

    def __init__(self, entry: Entry):
        self.entry = entry

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.entry.link.model is None:
            return None  # the entry has raised
        if self.entry.kind is Kind.HALF:
            return _leave_untraced(self.entry, module, output)
        return _leave(self.entry, module, output)


class PoolerHook:
    """Forward pre-hook of a backbone's pooler, which reads the first token of every row.

    It gets the rows of a padded batch back, and one row for each document of packed rows.
    """

    def __init__(self, link: Link):
        self.link = link

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        running = scopes.of_model(self.link.follow(module))
        if running is None or running.plan is None or not args:
            return None
        rows = running.plan.rows_for_pooler(args[0])
        return None if rows is None else (rows, *args[1:])


class SpanLogitsHook:
    """Forward hook of the parts of a question answering head: logits at padding become the least of their dtype.

    It holds nothing, since PEFT copies the heads that it trains.
    """

    # Traced, it is left out of a graph for other lengths (torch 2.13), and padding would count.
    @torch._dynamo.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        running = scopes.current()
        return None if running is None or running.plan is None else running.plan.span_logits(output)


def _defers(activation: Activation) -> bool:
    return activation.plan is not None and activation.plan.defers


# Deciding needs values on the host; traced, it would break the graph wherever one is read.
@torch._dynamo.disable
def _enter(
    entry: Entry, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    outer = scopes.of_model(entry.model)
    if outer is not None and outer.scope.stock:
        return None
    if entry.kind is Kind.HALF and outer is not None and isinstance(outer.plan, PairAsRows):
        return _open(HalfAsRow(Call(entry, module, args, kwargs, None), outer.plan.pair), entry)
    if outer is not None and outer.level >= entry.level:
        outer = None  # a call inside the model's own forward that begins anew
    if outer is not None and not _defers(outer):
        outer.enter(entry.level)  # called by its own top: all is done
        return None
    if outer is None:
        refusals.refuse_bypassed_top(entry)
        _follow_changes(entry.model)
    if entry.kind is Kind.PAIR:
        return _open(choose_pair(PairCall(entry, module, args, kwargs, outer)), entry)
    return _open(choose(Call(entry, module, args, kwargs, outer)), entry)


def _open(plan: Plan, entry: Entry) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    scopes.ambient.activation = Activation(plan.scope, scopes.ambient.activation, entry.level, plan)
    return None if plan.arguments is None else ((), plan.arguments)


def _follow_changes(model: EnabledModel) -> None:
    """Follow what may have changed since the last call: the attention implementation, checkpointing, the process."""
    model.lease.follow(model.implementations())
    bind_checkpointing(model.anatomy.checkpointed)
    accelerate.reroute(model.anatomy.mixers)


def _leave(entry: Entry, module: nn.Module, output: Any) -> Any:
    pooled = None
    if output is not None and pools_single_tokens(module):
        pooled = _pooled(entry.model, module, output)
    ended = scopes.close(entry.model, entry.level)
    if ended is None or ended.plan is None or output is None:
        return pooled
    finished = ended.plan.finish(module, output if pooled is None else pooled)
    return pooled if finished is None else finished


# Not traced, as their entry is not: T5's halves share one code, which Dynamo would read with the scope of the other.
_leave_untraced = torch._dynamo.disable(_leave)


def _pooled(model: EnabledModel, module: nn.Module, output: Any) -> Any:
    """The output with what the pooler makes of each document, or None for a call that packs nothing."""
    running = scopes.of_model(model)
    layout = None if running is None else running.scope.layout
    if layout is None:
        return None
    starts = layout.upload(DocumentBatch.without_padding(layout).starts)
    return pool_documents(module, output, starts.to(output[0].device))

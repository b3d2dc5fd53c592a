"""Forward hooks on an instance, by which calls enter an enabled model and leave it.

Hooks survive deepcopy, pickle, accelerate, DDP and PEFT, and leave the signature of `forward` as it
is. `_enter` takes every call: changes of the model are followed, the call is read
(`autopack.calls.call`), its plan is chosen (`autopack.calls.choose`) and its scope is put in force.
The model's own code runs, and finds the scope at its sites. `_leave` ends the scope and gives the
output the form that the caller expects.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from autopack.calls import refusals
from autopack.calls.call import Arguments, Call, CallPlan
from autopack.calls.choose import call_at, decide
from autopack.calls.encoder_decoder import HalfAsRow, PairAsRows
from autopack.calls.entry import Entry
from autopack.calls.outputs import without
from autopack.calls.padding_rules import PassThrough
from autopack.calls.rows import Inside, Unpadded, arguments_of_rows
from autopack.calls.sequence_parallel import SharedRows
from autopack.errors import AutopackError, LeakDetected, UnsupportedModel
from autopack.inspection import torches
from autopack.inspection.heads import pool_documents
from autopack.inspection.sharding import gathering_groups
from autopack.layout.host import upload
from autopack.layout.token_map import TokenMap
from autopack.patching import Site
from autopack.runtime import scope as scopes
from autopack.runtime.model import EnabledModel, in_a_group
from autopack.runtime.scope import Activation, bind_checkpointing
from autopack.runtime.tally import Volume

logger = logging.getLogger(__name__)


class ForwardGuard(ABC):
    """Forward pre-hook that can tell if `model.forward(...)` was called directly, without it."""

    @abstractmethod
    def is_past(self, module: nn.Module) -> bool:
        """Return True if the running forward skipped this hook; called once in every forward."""


def adapt_forward(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return a `forward` that, called directly outside a graph, calls the module with its hooks."""

    @functools.wraps(original, updated=())
    def autopack_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_past_entry(self, autopack_forward):
            return original(self, *args, **kwargs)
        return self(*args, **kwargs)

    return autopack_forward


def _is_past_entry(module: nn.Module, forward: Any) -> bool:
    """Return True if `forward` runs without the hooks and is the module's whole forward.

    A forward of a subclass, or on the instance, that calls this one would run twice; the sites that
    it reaches raise. Every `ForwardGuard` of the module is asked, once.
    """
    is_past = False
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, ForwardGuard):  # all of them: one that was passed forgets it here
            is_past |= hook.is_past(module)
    return is_past and "forward" not in vars(module) and type(module).forward is forward


class EntryHook(ForwardGuard):
    """Forward pre-hook of an entry: plans each call, opens its scope, changes its arguments."""

    def __init__(self, entry: Entry):
        self.entry = entry

    @torches.only_inlined
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan the call, open its scope; return new (args, kwargs), or None if they stay."""
        entry = self.entry
        model = entry.link.follow(module)
        # The arguments before `ambient`: Dynamo would make every graph depend on that.
        if torch.compiler.is_compiling() and _decodes_one_token(entry, args, kwargs):
            # Such a step of generation may have to be one graph, in no scope or in one in which
            # nothing is done.
            activation = scopes.ambient.activation
            if activation is None or type(activation.plan) is PassThrough:
                return None
        if not (entry.is_pair or entry.is_half or entry.guarded):
            running = scopes.of_model(model)
            # Compiled code cannot look at frames (see `current`), so only a first descent is
            # trusted here; anything else takes the slow path.
            if running is not None and running.deepest < entry.level:
                plan = running.plan
                if plan is None or not (plan.defers or plan.masks or plan.inside is not None):
                    running.enter(entry.level)  # a model further in gets what its top gives it
                    return None
        return _enter(self, model, module, args, kwargs)

    def is_past(self, module: nn.Module) -> bool:
        """Return True if the running forward was called directly, past this hook; not in stock."""
        model = self.entry.link.model
        running = None if model is None else scopes.of_model(model)
        return running is None or not (running.scope.stock or self.entry.level in running.passed)


class ExitHook:
    """Forward hook of an entry: ends a call's scope, also after an error, and forms its output."""

    def __init__(self, entry: Entry):
        self.entry = entry

    @torches.only_inlined
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """End the call's scope; return the caller's output, or None to keep the model's."""
        model = self.entry.link.model
        if model is None:
            return None  # the entry has raised
        if not self.entry.is_half:
            return _leave(self.entry, model, module, output)
        entered = scopes.ambient.activation
        if torch.compiler.is_compiling() and (
            entered is None or self.entry.level not in entered.passed
        ):
            return None  # the entry has left it out of the graph
        return _leave_untraced(self.entry, model, module, output)


def _decodes_one_token(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call brings one token per row, so that no row holds two documents."""
    given = {**torches.by_name(entry.names, args), **kwargs}
    if entry.is_pair and given.get("encoder_outputs") is None:
        return False
    prefix = "decoder_" if entry.is_pair else ""
    values = [given.get(prefix + name) for name in ("input_ids", "inputs_embeds")]
    brought = [tokens for tokens in values if tokens is not None]
    # By its length: Dynamo of torch 2.4 cannot tell whether a list is true.
    return len(brought) > 0 and all(tokens.ndim > 1 and tokens.shape[1] == 1 for tokens in brought)


# Traced, it would break the graph wherever a value is read on the host. torch.compile(model) runs
# the hooks of the model itself outside of its graph, those of models inside in it.
@torches.untraced(
    "autopack reads on the host where documents begin, once per call: compile the model itself, "
    "torch.compile(model), and not a function that calls it, or compile without fullgraph=True"
)
def _enter(
    hook: EntryHook, model: EnabledModel, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Update the model, plan a call, open its scope; return new arguments, None if they stay."""
    outer, level = scopes.of_model(model), hook.entry.level
    if outer is None or outer.level >= level:
        # A call, or one inside a forward that begins anew: the model is brought up to date with
        # changed code, attention, sharding and checkpointing.
        outer, anatomy = None, model.anatomy
        if level:
            refusals.refuse_bypassed_top(anatomy.entries[:level])
        model.groups = gathering_groups(anatomy.entries[0]) if in_a_group() else ()
        if FakeTensor not in map(type, (*args, *kwargs.values())):  # a trace proves no model
            model.follow_code()  # which may replace `hook.entry`
        model.lease.follow(model.implementations())
        bind_checkpointing(model.anatomy.checkpointed)
    if outer is None or (outer.plan is not None and outer.plan.defers):
        return _open(_planned(call_at(hook.entry, module, args, kwargs, outer)))
    if outer.scope.stock:
        return None
    return _enter_inside(Call(hook.entry, module, args, kwargs, None), outer)


def _planned(call: Call) -> CallPlan:
    """Return a call's plan, counted and, if due, checked; raise if refused, or pass it through.

    A lenient model runs a refused call as it came instead, with a warning. Raises `LeakDetected` if
    the check finds a leak.
    """
    model = call.model
    try:
        plan = decide(call)
        if call.outer is None and model.live is not None and (plan.packs or plan.defers):
            if model.is_checked_closely and not model.live.has_checked and torches.is_recorded():
                raise UnsupportedModel(
                    f"{call.name} is called inside a transform of torch.func, a trace or a graph, "
                    "where its calls cannot be checked, and they have to be "
                    f"({model.proof.how}). Call it once outside of these.",
                    code="recorded-call",
                )
            proof = model.proof
            model.live.before(call)
            plan = plan if model.proof is proof else decide(call)
        plan.count(model.tally)
        call.count(plan.volume)
    except LeakDetected:
        raise
    except AutopackError as refused:
        # The documents of packed rows that a head has made the rows of this batch cannot be left to
        # stock.
        if not model.lenient or call.of_head is not None:
            raise
        reason = " ".join(str(refused).split())
        if not model.tally.refused[reason] and not model.is_audited:
            logger.warning(
                "a call of %s runs as it would have without autopack: %s", call.name, reason
            )
        model.tally.refused[reason] += 1
        return PassThrough(call, f"autopack refuses it: {reason}")
    if (
        logger.isEnabledFor(logging.DEBUG)
        and (said := (call.name, plan.what, plan.reason)) not in model.logged
    ):
        model.logged.add(said)
        logger.debug("a call of %s %s, since %s", *said)
    return plan


def _open(plan: CallPlan) -> Arguments | None:
    """Put a plan's scope in force and tell the calls around it; return new arguments, or None.

    If it packs, the calls of the same model around it are marked as `packed_inside`.
    """
    opened = scopes.ambient.activation = Activation(
        plan.scope,
        scopes.ambient.activation,
        plan.call.entry.level,
        plan,
    )
    around = opened.outer if plan.packs else None
    while around is not None and around.scope.model is opened.scope.model:
        around.packed_inside, around = True, around.outer
    return None if plan.arguments is None else plan.call.handed_on(plan.arguments)


def _enter_inside(call: Call, outer: Activation) -> Arguments | None:
    """Enter a call inside another of its model; return new arguments, or None if they stay."""
    entry, plan = call.entry, outer.plan
    if entry.is_half and isinstance(plan, PairAsRows):
        return _open(HalfAsRow(call, plan.pair))
    if plan is not None and plan.inside is not None and not outer.apart:
        inside = Inside.at(call, outer)
        if inside is not None:
            return _open(inside)
        if not entry.holds_models:
            plan.leave_apart(outer)
    further = _enter_from_foreign_code(call, outer) if entry.guarded else None
    if further is None and scopes.ambient.activation is outer:  # and none was opened for it
        outer.enter(entry.level)  # called by its own top: all is done
        if plan is not None and plan.masks and "attention_mask" in call.given:
            return call.handed_on({**call.arguments, "attention_mask": None})
    return further


def _enter_from_foreign_code(call: Call, outer: Activation) -> Arguments | None:
    """Enter a call from third-party code; return new arguments, or None to run it as `outer` is.

    Documents that are declared for it alone open a scope of its own. Raises `UnsupportedModel` for
    other documents than a packed `outer` has.
    """
    layout = outer.scope.layout
    if layout is None:
        # Padding was decided about where the call came in.
        if call.declared.layout is None:
            return None
        if outer.plan is not None and outer.volume is not None:
            # The call around it was counted as one that packs nothing.
            outer.plan.call.count(Volume(), instead_of=outer.volume)
            outer.volume = None
        return _open(_planned(call))
    if call.inputs is None:
        return None
    if isinstance(outer.plan, SharedRows):
        arguments = outer.plan.arguments_inside(call)
    else:
        refusals.refuse_other_documents(call, layout)
        arguments = arguments_of_rows(call, layout)
    outer.enter(call.entry.level)
    return call.handed_on(arguments)


@torches.only_inlined
def _leave(entry: Entry, model: EnabledModel, module: nn.Module, output: Any) -> Any:
    """End a call's scope; return its output in the caller's form; raise on a leak."""
    if entry.pools_single_tokens and output is not None:
        output = _pooled(model, module, output)
    ended = scopes.close(model, entry.level)
    if ended is None or ended.plan is None or output is None:
        return output
    plan, outer = ended.plan, ended.outer
    if ended.foreign or (outer is not None and outer.foreign):
        _leave_foreign(ended, module, output)
    packs = plan.packs or ended.packed_inside
    is_whole = outer is None or outer.scope.model is not model
    as_batch = plan.defers and plan.of_head is None  # its head has seen the padded form
    if packs and model.proof.leaves_out and is_whole and not as_batch:
        output = without(output, model.proof.leaves_out)
    finished = plan.finish(ended, module, output)
    if model.groups and is_whole:
        _check_together(ended, packs)
    return output if finished is None else finished


@torch._dynamo.disable
def _check_together(ended: Activation, packs: bool) -> None:
    """Check, if due, a finished call whose parameters ranks gather; raise if documents mix."""
    if ended.scope.model.live is not None:
        ended.scope.model.live.after(ended.plan.call, packs)


@torch._dynamo.disable
def _leave_foreign(ended: Activation, module: nn.Module, output: Any) -> None:
    """Raise if a third-party loss may mix documents; add the call's layouts to the outer call."""
    outer = ended.outer
    if ended.foreign:
        refusals.check_loss(ended, module, output)
    if (
        outer is not None
        and outer.scope.model is ended.scope.model
        and not isinstance(ended.plan, Unpadded)
    ):
        outer.inside += ended.layouts


# Not traced, as their entry is not: T5's halves share one code, which Dynamo would read with the
# scope of the other.
_leave_untraced = torch._dynamo.disable(_leave)


def _pooled(model: EnabledModel, module: nn.Module, output: Any) -> Any:
    """Pool output per document and note that in the activation; return others unchanged."""
    running = scopes.of_model(model)
    if running is None or running.scope.layout is None:
        return output
    running.pooled = True
    starts = TokenMap.of_documents(running.scope.layout).starts
    return pool_documents(module, output, upload(starts, output[0].device))

"""The way into an enabled model and out of it: forward hooks on the instance.

Hooks survive deepcopy, pickle, accelerate, DDP and PEFT, and leave the signature of `forward` as it is. The entry
decides what becomes of the call (`autopack.calls.choose`) and puts its scope in force; the exit ends it and gives the
output the form that the caller expects.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from autopack.calls import refusals
from autopack.calls.call import Call
from autopack.calls.choose import call_at, decide
from autopack.calls.encoder_decoder import HalfAsRow, PairAsRows
from autopack.calls.entry import Entry, Kind
from autopack.calls.forward_site import ForwardGuard
from autopack.calls.loss_site import documents_of
from autopack.calls.outputs import without
from autopack.calls.packed import PrefixesInside, inner_arguments, without_mask
from autopack.calls.plan import Plan, Untouched
from autopack.calls.sequence_parallel import SharedRows
from autopack.calls.unpadded import Unpadded
from autopack.errors import AutopackError, LeakDetected, UnsupportedModel
from autopack.inspection import process, torches
from autopack.inspection.modules import pool_documents, pools_single_tokens
from autopack.inspection.sharding import gathering_groups
from autopack.integrations import accelerate
from autopack.layout.token_map import TokenMap
from autopack.runtime import scope as scopes
from autopack.runtime.model import EnabledModel, Link
from autopack.runtime.runs import bind_checkpointing
from autopack.runtime.scope import Activation
from autopack.runtime.tally import Volume

logger = logging.getLogger(__name__)


class EntryHook(ForwardGuard):
    """Forward pre-hook of an enabled model and of each model inside it that takes tokens."""

    def __init__(self, entry: Entry):
        self.entry = entry

    @torches.only_inlined
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self.entry
        model = entry.link.follow(module)
        # Its tokens first, so that graphs of other calls do not depend on what is in force.
        if torch.compiler.is_compiling() and _decodes_one_token(entry, args, kwargs) and _is_left_to_stock():
            return None  # such a step of generation may have to be one graph
        if entry.kind is Kind.MODEL and not entry.guarded:
            running = scopes.of_model(model)
            # Compiled code cannot look at frames (see `current`), so only a first descent is trusted here; anything
            # else takes the slow path.
            if running is not None and running.deepest < entry.level and _passes(running):
                running.enter(entry.level)
                return None
        return _enter(self, module, args, kwargs)

    def is_past(self, module: nn.Module) -> bool:
        model = self.entry.link.model
        running = None if model is None else scopes.of_model(model)
        return running is None or not (running.scope.stock or self.entry.level in running.passed)


class ExitHook:
    """Forward hook of the same models: ends what the entry began, also after an error."""

    def __init__(self, entry: Entry):
        self.entry = entry

    @torches.only_inlined
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.entry.link.model is None:
            return None  # the entry has raised
        if self.entry.kind is Kind.HALF:
            entered = scopes.ambient.activation
            if torch.compiler.is_compiling() and (entered is None or self.entry.level not in entered.passed):
                return None  # the entry has left it out of the graph
            return _leave_untraced(self.entry, module, output)
        return _leave(self.entry, module, output)


class ArrivalHook:
    """Forward hook of a module that mixes tokens: in a packed forward it must have come to its site. Holds nothing."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        scopes.check_arrival(module, output)


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
        if rows is None:
            return None
        running.plan.pooled = True
        return (rows, *args[1:])


class OwnPositionsHook:
    """Forward pre-hook of models of media that may be handed the positions of packed rows, which number other tokens.

    Models of BLIP hand all that they do not name on to their tower and Q-Former (InstructBLIP Video). That one would
    number its own tokens by them, and flash attention take a tower's row for documents.
    """

    def __init__(self, link: Link):
        self.link = link

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running = scopes.of_model(self.link.follow(module))
        if running is None or running.scope.layout is None or "position_ids" not in kwargs:
            return None
        return args, {name: value for name, value in kwargs.items() if name != "position_ids"}


class SpanLogitsHook:
    """Forward hook of the parts of a question answering head: logits at padding become the least of their dtype.

    It holds nothing, since PEFT copies the heads that it trains.
    """

    # Traced, it is left out of a graph for other lengths (torch 2.13), and padding would count.
    @torch._dynamo.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        running = scopes.current()
        return None if running is None or running.plan is None else running.plan.span_logits(output)


def _is_left_to_stock() -> bool:
    """Whether compiled code runs in no scope, or in one in which nothing is done."""
    activation = scopes.ambient.activation
    return activation is None or type(activation.plan) is Untouched


def _decodes_one_token(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call brings one token per row, which can hold no two documents."""
    given = {**torches.by_name(entry.names, args), **kwargs}
    if entry.kind is Kind.PAIR and given.get("encoder_outputs") is None:
        return False
    names = (
        ("decoder_input_ids", "decoder_inputs_embeds") if entry.kind is Kind.PAIR else ("input_ids", "inputs_embeds")
    )
    brought = [given[name] for name in names if given.get(name) is not None]
    # By its length: Dynamo of torch 2.4 cannot tell whether a list is true.
    return len(brought) > 0 and all(tokens.ndim > 1 and tokens.shape[1] == 1 for tokens in brought)


def _defers(activation: Activation) -> bool:
    return activation.plan is not None and activation.plan.defers


def _passes(activation: Activation) -> bool:
    """Whether a model further in gets what its top gives it."""
    plan = activation.plan
    return plan is None or not (plan.defers or plan.masks or plan.prefixes_inside is not None)


# Traced, it would break the graph wherever a value is read on the host. torch.compile(model) runs the hooks of the
# model itself outside of its graph, those of models inside in it.
@torches.untraced(
    "autopack reads on the host where documents begin, once per call: compile the model itself, torch.compile(model), "
    "and not a function that calls it, or compile without fullgraph=True"
)
def _enter(
    hook: EntryHook, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    entry = hook.entry
    outer = scopes.of_model(entry.model)
    if outer is not None and outer.scope.stock:
        return None
    if entry.kind is Kind.HALF and outer is not None and isinstance(outer.plan, PairAsRows):
        return _open(HalfAsRow(Call(entry, module, args, kwargs, None), outer.plan.pair), hook, args)
    if outer is not None and outer.level >= entry.level:
        outer = None  # a call inside the model's own forward that begins anew
    if outer is not None and outer.plan is not None and outer.plan.prefixes_inside is not None:
        inside = PrefixesInside.at(Call(entry, module, args, kwargs, None), outer)
        if inside is not None:
            return _open(inside, hook, args)
        if not entry.inner:
            outer.plan.leave_apart()
    if outer is not None and not _defers(outer):
        further = _further_in(hook, module, args, kwargs, outer) if entry.guarded else None
        if further is None:
            outer.enter(entry.level)  # called by its own top: all is done
            if outer.plan is not None and outer.plan.masks:
                further = without_mask(entry, args, kwargs)
        return further
    call = call_at(entry, module, args, kwargs, outer)
    model = entry.model
    if outer is None:
        refusals.refuse_bypassed_top(entry)
        model.groups = gathering_groups(model.anatomy.entries[0])
        if not isinstance(call.inputs, FakeTensor):  # of a trace, in which no model can be proven
            model.follow_code()
        if hook.entry is not entry:
            call = call_at(hook.entry, module, args, kwargs)
        _follow_changes(model)
        if (mode := process.foreign_mode()) is not None:
            model.runs_other_code, model.is_checked_closely, model.unknown_code = True, True, mode
    return _open(_chosen(call), hook, args)


def _chosen(call: Call) -> Plan:
    try:
        plan = _checked(call, decide(call))
        plan.call = call
        plan.count(call.model.tally)
        call.count(plan.volume)
        _log_once(call, plan)
        return plan
    except LeakDetected:
        raise
    except AutopackError as refused:
        # The documents of packed rows that a head has made the rows of this batch cannot be left to stock.
        if not call.model.lenient or call.documents is not None:
            raise
        reason = " ".join(str(refused).split())
        if not call.model.tally.refused[reason] and not call.model.is_audited:
            logger.warning("a call of %s runs as it would have without autopack: %s", call.name, reason)
        call.model.tally.refused[reason] += 1
        return Untouched(call.model, f"autopack refuses it: {reason}")


def _checked(call: Call, plan: Plan) -> Plan:
    """Return the plan of a call once it has been checked, if that is due. Raises `LeakDetected`."""
    model = call.model
    if call.outer is not None or model.live is None or not (plan.packs or plan.defers):
        return plan
    if torches.is_recorded() and model.is_checked_closely and not model.live.has_checked:
        raise UnsupportedModel(
            f"{call.name} is called inside a transform of torch.func, a trace or a graph, where its calls cannot be "
            f"checked, and they have to be ({model.proof.how}). Call it once outside of these.",
            code="recorded-call",
        )
    proof = model.proof
    model.live.before(call)
    return plan if model.proof is proof else decide(call)


def _log_once(call: Call, plan: Plan) -> None:
    """Log what becomes of a call, where this model has met no decision of that kind before."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    kind = (call.name, plan.what, plan.reason)
    if kind not in call.model.logged:
        call.model.logged.add(kind)
        logger.debug("a call of %s %s, since %s", *kind)


def _further_in(
    hook: EntryHook, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Activation
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Enter a model that somebody else's code has called, inside a call that has been decided about.

    None where it is to run as the call was meant; what is declared for it alone opens a scope of its own.
    """
    call = Call(hook.entry, module, args, kwargs, None)
    layout = outer.scope.layout
    if layout is None:
        # Padding was decided about where the call came in.
        if call.declared.layout is None:
            return None
        if outer.plan is not None and outer.plan.volume is not None:
            # The call around it was counted as one that packs nothing.
            outer.plan.call.count(Volume(), instead_of=outer.plan.volume)
            outer.plan.volume = None
        return _open(_chosen(call), hook, args)
    if call.inputs is None:
        return None
    if isinstance(outer.plan, SharedRows):
        arguments = outer.plan.further_in(call)
        outer.enter(hook.entry.level)
        return _handed_on(arguments, hook.entry, args)
    refusals.refuse_other_documents(call, layout)
    outer.enter(hook.entry.level)
    return _handed_on(inner_arguments(call, layout), hook.entry, args)


def _open(plan: Plan, hook: EntryHook, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    opened = Activation(plan.scope, scopes.ambient.activation, hook.entry.level, plan)
    opened.foreign = hook.entry.foreign is not None
    scopes.ambient.activation = opened
    around: Activation | None = opened
    while plan.packs and around is not None and around.scope.model is opened.scope.model:
        around.packs, around = True, around.outer
    return _handed_on(plan.arguments, hook.entry, args)


def _handed_on(
    arguments: dict[str, Any] | None, entry: Entry, args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments as the forward gets them: those that came by position go on by position."""
    if arguments is None:
        return None
    by_name = dict(arguments)
    return tuple(by_name.pop(name, None) for name in entry.names[: len(args)]), by_name


def _follow_changes(model: EnabledModel) -> None:
    """Follow what may have changed since the last call: the attention implementation, checkpointing, the process."""
    model.lease.follow(model.implementations())
    bind_checkpointing(model.anatomy.checkpointed)
    accelerate.reroute(model.anatomy.mixers)


@torches.only_inlined
def _leave(entry: Entry, module: nn.Module, output: Any) -> Any:
    pooled = None
    if output is not None and pools_single_tokens(module):
        pooled = _pooled(entry.model, module, output)
    ended = scopes.close(entry.model, entry.level)
    if ended is None or ended.plan is None or output is None:
        return pooled
    if ended.foreign or (ended.outer is not None and ended.outer.foreign):
        _leave_foreign(ended, module, output)
    names = ended.scope.model.proof.leaves_out
    is_whole = ended.outer is None or ended.outer.scope.model is not ended.scope.model
    as_batch = ended.plan.defers and ended.plan.documents is None  # its head has seen the padded form
    if names and ended.packs and is_whole and not as_batch:
        pooled = without(output if pooled is None else pooled, names)
    finished = ended.plan.finish(module, output if pooled is None else pooled)
    changed = pooled if finished is None else finished
    model = ended.scope.model
    if model.groups:
        _check_together(ended)
    return changed


@torch._dynamo.disable
def _check_together(ended: Activation) -> None:
    """Check a call of a whole model whose parameters ranks gather together, if that is due."""
    model, outer = ended.scope.model, ended.outer
    if model.live is not None and ended.plan.call is not None and (outer is None or outer.scope.model is not model):
        model.live.after(ended.plan.call, ended.packs)


@torch._dynamo.disable
def _leave_foreign(ended: Activation, module: nn.Module, output: Any) -> None:
    outer = ended.outer
    if ended.foreign:
        refusals.check_loss(ended, module, output)
    if outer is not None and outer.scope.model is ended.scope.model and not isinstance(ended.plan, Unpadded):
        outer.inside += documents_of(ended)


# Not traced, as their entry is not: T5's halves share one code, which Dynamo would read with the scope of the other.
_leave_untraced = torch._dynamo.disable(_leave)


def _pooled(model: EnabledModel, module: nn.Module, output: Any) -> Any:
    """The output with what the pooler makes of each document, or None for a call that packs nothing."""
    running = scopes.of_model(model)
    layout = None if running is None else running.scope.layout
    if running is None or layout is None:
        return None
    if running.plan is not None:
        running.plan.pooled = True
    starts = layout.upload(TokenMap.of_documents(layout).starts)
    return pool_documents(module, output, starts.to(output[0].device))

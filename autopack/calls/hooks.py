"""The entry and exit of an enabled model: forward hooks that find the documents of a call and open its scope.

Hooks on the instance survive deepcopy, pickle, accelerate, DDP and PEFT, and leave the signature of `forward` as it is.
A packed call is normalised; a padded batch becomes a packed row and the exit restores its form; any other call goes
through untouched.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.calls import documents as heads_of_documents
from autopack.calls import model_positions, unpadded
from autopack.calls.outputs import restore
from autopack.errors import InvalidPacking, OutsideForward, UnsupportedModel
from autopack.inspection import media, releases, source
from autopack.inspection.heads import row_head
from autopack.inspection.poolers import pool_documents, pools_single_tokens
from autopack.layout import batches, declarations
from autopack.layout.padding import Padding
from autopack.runtime.scope import Scope, close_scope, current, open_scope

if TYPE_CHECKING:
    from autopack.layout.declarations import Declared
    from autopack.layout.packed import PackedLayout
    from autopack.runtime.model import Enabled

__all__ = [
    "EntryHook",
    "ExitHook",
    "PoolerHook",
    "by_name",
    "inputs_of",
    "refuse_bypassed_top",
    "refuse_caches",
    "refuse_given",
    "uses_positions",
    "wants_weights",
    "without_what_packing_drops",
]

_TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "LMHeadModel")


class EntryHook:
    """Forward pre-hook of an enabled model and of its backbone; `level` is its place among the entries of the model."""

    def __init__(self, enabled: Enabled, level: int):
        model = enabled.entries[level]
        self.enabled = enabled
        self.level = level
        self.shifts_labels = source.shifts_labels(model)
        self.head = row_head(model)
        self.runs_alone = None if self.head is None else heads_of_documents.why_alone(enabled, level)
        self.inner_head = next((head for head in map(row_head, enabled.entries[level + 1 :]) if head), None)
        cls: Any = type(model)
        self.names, takes_others = _parameters(cls)
        self.takes_positions = "position_ids" in self.names or takes_others
        self.has_other_head = "labels" in self.names and not self.shifts_labels and not _is_backbone(model)
        self.reads_one_token_per_row = getattr(enabled.entries[-1], "pooler", None) is not None or (
            self.has_other_head
            and not type(model).__name__.endswith(_TOKEN_HEADS)
            and type(model).__name__ not in releases.causal_lm_class_names()
        )

    def __call__(
        self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        scope = current()
        # Going deeper for the first time is all that compiled code may take for granted: see `current`.
        if scope is not None and scope.owner is self.enabled and scope.deepest < self.level and not scope.waits:
            scope.enter(self.level)  # the backbone, called by its own top: all is done
            return None
        return _enter(self, module, args, kwargs)


class ExitHook:
    """Forward hook of an enabled model and of its backbone: closes what the entry opened, also after an error.

    The output of a padded batch that ran as a packed row gets the form of the batch back.
    """

    def __init__(self, enabled: Enabled, level: int):
        self.enabled = enabled
        self.level = level

    def __call__(self, module: PreTrainedModel, args: tuple[Any, ...], output: Any) -> Any:
        pooled = None
        if output is not None and pools_single_tokens(module):
            pooled = self._pooled(module, output)
            output = output if pooled is None else pooled
        scope = close_scope(self.enabled, self.level)
        if scope is None or output is None:
            return pooled
        if scope.documents is not None and scope.documents.level == self.level:
            return scope.documents.finish(module, output)
        if scope.pair is not None:
            restored = restore(output, scope.pair)
            return restored.to_tuple() if scope.pair.wants_tuple else restored
        return pooled if scope.padding is None else restore(output, scope.padding)

    def _pooled(self, module: PreTrainedModel, output: Any) -> Any:
        """The output with what the pooler makes of each document, or None for a call that packs nothing."""
        scope = current()
        if scope is None or scope.owner is not self.enabled or scope.layout is None:
            return None
        starts = scope.layout.upload(batches.DocumentRows.of(scope.layout).starts)
        return pool_documents(module, output, starts.to(output[0].device))


class PoolerHook:
    """Forward pre-hook of a backbone's pooler, which reads the first token of every row.

    It gets the rows of a padded batch back, and one row for each document of packed rows.
    """

    def __init__(self, enabled: Enabled):
        self.enabled = enabled

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        scope = current()
        if scope is None or scope.owner is not self.enabled or not args:
            return None
        if scope.padding is not None:
            return scope.padding.restore(args[0]), *args[1:]
        if scope.layout is not None:
            return batches.DocumentRows.of(scope.layout).spread(args[0]), *args[1:]
        return None


# Reading the declarations needs values on the host; traced, it would break the graph at every read.
@torch._dynamo.disable
def _enter(
    hook: EntryHook, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    enabled, outer = hook.enabled, current()
    inside = outer is not None and outer.owner is enabled and outer.level < hook.level
    if outer is not None and inside and not outer.waits:
        outer.enter(hook.level)  # the backbone, called by its own top once more
        return None
    if not inside:
        refuse_bypassed_top(enabled, hook.level)
        enabled.refresh()
    arguments = by_name(type(module), args, kwargs)
    declared = declarations.Declared(None)
    inputs = inputs_of(arguments)
    if inputs is not None:
        declared = declarations.read(arguments, (inputs.shape[0], inputs.shape[1]), inputs.device)
        spreads = inside and outer is not None and outer.documents is not None
        if declared.pads and (enabled.unpad != "never" or spreads) and len(args) <= len(hook.names):
            padding = Padding(declared.real, inputs.device)  # type: ignore[arg-type]
            return _enter_padded(hook, module, arguments, declared, padding, outer, inside)
    if declared.layout is None:
        if inside and outer is not None and declared.real is None and hook.level + 1 == len(enabled.entries):
            enabled.tally.left["the mask is made outside of the text model"] += 1
        open_scope(Scope(enabled, None, outer, hook.level))
        return None
    enabled.check_sites()
    unnamed = len(args) - len(hook.names)
    if unnamed > 0:
        raise UnsupportedModel(
            f"{type(module).__name__}.forward does not name the last {unnamed} of {len(args)} positional arguments, so "
            f"autopack cannot tell what they are. Pass them by name."
        )
    if hook.head is not None:
        return _enter_with_documents(hook, module, arguments, declared.layout, outer)
    packed = _packed_call(hook, module, arguments, declared.layout)
    open_scope(Scope(enabled, declared.layout, outer, hook.level, wants_weights(module, arguments)))
    return (), packed


def _enter_padded(
    hook: EntryHook,
    module: PreTrainedModel,
    arguments: dict[str, Any],
    declared: Declared,
    padding: Padding,
    outer: Scope | None,
    inside: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Enter with a padded batch: as a packed row, or as it came, perhaps for an entry further in to pack.

    `inside` says that an entry further out has passed it on.
    """
    enabled, reason = hook.enabled, None
    documents = outer.documents if inside and outer is not None else None
    if not inside:
        weights = wants_weights(module, arguments)
        reason = unpadded.obstacle(enabled, padding, declared, module, arguments, hook, weights)
    waits = reason is None
    reason = reason or unpadded.obstacle_here(enabled, padding, module, arguments, hook)
    if reason is not None:
        waits = waits and hook.level + 1 < len(enabled.entries)
        if waits and hook.shifts_labels and declared.labelled_after_padding:
            waits = False
            reason = "a label is compared with what is predicted at padding, which only this entry could mask"
        if not waits and documents is not None:
            raise UnsupportedModel(
                f"{documents.name} cannot run the documents of packed rows without padding: {reason}. Run them one per "
                f"row."
            )
        if not waits:
            enabled.tally.left[reason] += 1
        open_scope(Scope(enabled, None, outer, hook.level, waits=waits, documents=documents))
        return None
    enabled.check_sites()
    if documents is None:
        enabled.tally.count(padding)
    else:
        documents.unpadded = True
    call = unpadded.gather(enabled, padding, arguments, module.config, hook.shifts_labels)
    layout = padding.layout(declared.positions)
    open_scope(Scope(enabled, layout, outer, hook.level, padding=padding))
    return (), without_what_packing_drops(hook, module, call)


def _enter_with_documents(
    hook: EntryHook, module: PreTrainedModel, arguments: dict[str, Any], layout: PackedLayout, outer: Scope | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Enter a head with one result per row: its rows become the documents."""
    _refuse_what_cannot_be_packed(hook, module, arguments, layout)
    call = without_what_packing_drops(hook, module, arguments)
    documents = heads_of_documents.spread(hook, module, call, layout, wants_weights(module, arguments))
    open_scope(Scope(hook.enabled, None, outer, hook.level, waits=documents.waits, documents=documents))
    return (), documents.arguments


def refuse_bypassed_top(enabled: Enabled, level: int) -> None:
    """A backbone called on its own is fine; called by its top's `forward`, the top's labels went past the entry."""
    tops = enabled.entries[:level]
    frame = sys._getframe(1) if tops else None
    while frame is not None:
        # Only of methods: up to Python 3.12 asking for the locals keeps them alive until the frame ends.
        caller = frame.f_locals.get("self") if "forward" in frame.f_code.co_name else None
        if any(caller is top for top in tops):
            raise OutsideForward(
                f"{type(caller).__name__}.forward was called directly, past the entry of an enabled model. "
                f"Call the model itself: `model(...)`."
            )
        frame = frame.f_back


def _is_backbone(model: PreTrainedModel) -> bool:
    """Whether a model has no head although it takes labels, as the backbones of some image-text models do."""
    return type(model).__name__.endswith("Model") and "Head" not in type(model).__name__ and row_head(model) is None


@cache
def _parameters(cls: Any) -> tuple[tuple[str, ...], bool]:
    """Names of the forward's parameters in order, and whether it takes others by `**kwargs`.

    A forward that only passes everything on, `forward(*args, **kwargs)`, has the parameters of its base class.
    """
    for base in cls.__mro__:
        if "forward" in vars(base):
            parameters = list(inspect.signature(base.forward).parameters.values())[1:]
            named = tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
            if named:
                return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
    return (), True


def by_name(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names, _ = _parameters(cls)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def inputs_of(arguments: dict[str, Any]) -> torch.Tensor | None:
    for name in ("input_ids", "inputs_embeds"):
        value = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value
    return None


def wants_weights(module: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    told = arguments.get("output_attentions")
    return bool(told if told is not None else getattr(module.config, "output_attentions", False))


def _packed_call(
    hook: EntryHook, module: PreTrainedModel, arguments: dict[str, Any], layout: PackedLayout
) -> dict[str, Any]:
    """The arguments of a packed call as the model should see them."""
    _refuse_what_cannot_be_packed(hook, module, arguments, layout)
    call = without_what_packing_drops(hook, module, arguments)
    if uses_positions(hook):
        computed = model_positions.positions_of_documents(hook.enabled.entries[hook.level :], arguments, layout)
        if computed is not None:
            call["position_ids"] = computed
        elif call.get("position_ids") is None:
            if not hook.takes_positions:
                raise UnsupportedModel(
                    f"{type(module).__name__}.forward takes no position_ids, so positions cannot restart at each "
                    f"document"
                )
            call["position_ids"] = layout.position_ids(hook.enabled.first_position)
    if hook.shifts_labels:
        _mask_boundary_labels(call, layout)
    return call


def uses_positions(hook: EntryHook) -> bool:
    # A document that is run alone needs none where the model takes none.
    return hook.enabled.uses_positions and (hook.enabled.one_by_one is None or "position_ids" in hook.names)


def without_what_packing_drops(hook: EntryHook, module: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    cls: Any = type(module)
    names, takes_others = _parameters(cls)
    call = {name: value for name, value in arguments.items() if name not in declarations.LAYOUT_KWARGS}
    if not uses_positions(hook):
        call.pop("position_ids", None)
    for name in unpadded.DROPPED:
        if call.get(name) is not None:
            call[name] = None
    if "use_cache" in names or (takes_others and getattr(module.config, "use_cache", False)):
        call["use_cache"] = False
    return call


def _refuse_what_cannot_be_packed(
    hook: EntryHook, module: PreTrainedModel, arguments: dict[str, Any], layout: PackedLayout
) -> None:
    refuse_caches(arguments)
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (layout.rows, layout.columns)):
        found = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidPacking(
            f"attention_mask must have the shape of the batch, ({layout.rows}, {layout.columns}), on packed rows; "
            f"found {found}. Masks within documents are made by the model; leave a mask prepared by hand out."
        )
    refuse_given(hook.enabled, type(module).__name__, arguments)
    if arguments.get("encoder_hidden_states") is not None:
        raise UnsupportedModel(
            "encoder_hidden_states were given with packed rows: cross-attention would let every document see the "
            "encoder states of all. Run such documents one per row."
        )
    if hook.head is None and hook.inner_head is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} holds {hook.inner_head.name}, which gives one result per row; what of it is per "
            f"document cannot be told on packed rows. Call {hook.inner_head.name} itself, or run documents one per row."
        )
    if hook.head is not None and hook.head.refusal is not None:
        raise UnsupportedModel(
            f"{hook.head.name} cannot be run on packed rows: {hook.head.refusal}. Run its questions as padded batches."
        )


def refuse_given(enabled: Enabled, model: str, arguments: dict[str, Any]) -> None:
    """Raise `UnsupportedModel` for an argument that no call of this family may bring with packed rows."""
    for name, reason in enabled.refused_arguments.items():
        if arguments.get(name) is not None:
            raise UnsupportedModel(
                f"{name} was given to {model} with packed rows: {reason}. Leave it out, or run the "
                f"documents one per row."
            )
    for name in media.given(arguments):
        for kind in sorted(media.kinds(name, arguments[name]) - enabled.media):
            raise UnsupportedModel(
                f"{name} was given to {model} with packed rows, but no run of the leak test has "
                f"covered documents of {enabled.model_type!r} with {kind}s. Leave it out (text alone is served), "
                f"or run the documents one per row."
            )


def refuse_caches(arguments: dict[str, Any]) -> None:
    """Raise `InvalidPacking` where packed rows are to fill or continue a cache."""
    if arguments.get("use_cache"):
        raise InvalidPacking(
            "use_cache=True was given with packed rows, but a cache cannot tell documents apart. Leave use_cache out "
            "(autopack turns the config's default off for packed calls), or run the documents one per row."
        )
    cache_given = next((arguments[n] for n in unpadded.CACHES if arguments.get(n) is not None), None)
    if cache_given is not None and _cached_tokens(cache_given):
        raise InvalidPacking(
            f"past_key_values holds {_cached_tokens(cache_given)} tokens, and packed rows cannot continue a cache. "
            f"Pass no cache, or run the documents one per row."
        )


def _cached_tokens(past: Any) -> int:
    if hasattr(past, "get_seq_length"):
        return int(past.get_seq_length())
    return int(past[0][0].shape[-2]) if past and past[0] is not None else 0


def _mask_boundary_labels(call: dict[str, Any], layout: PackedLayout) -> None:
    """No document predicts the first token of the next: label -100 there, as it is for a document alone."""
    first = layout.cu_seqlens[:-1].long()
    for name, at in (("labels", first), ("shift_labels", layout.cu_seqlens[1:].long() - 1)):
        labels = call.get(name)
        if isinstance(labels, torch.Tensor) and tuple(labels.shape) == (layout.rows, layout.columns):
            at = at.to(labels.device)
            call[name] = labels.reshape(-1).index_fill(0, at, -100).reshape(labels.shape)

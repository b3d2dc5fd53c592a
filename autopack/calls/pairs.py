"""Entries of encoder-decoders: the call of the whole finds the documents of both halves, and each half runs by itself.

The call opens a scope without a layout, which names the pair; the encoder and the decoder, models of their own, each
open one inside it with theirs. Cross-attention finds both layouts in the decoder's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autopack.calls import unpadded
from autopack.calls.hooks import (
    EntryHook,
    ExitHook,
    by_name,
    inputs_of,
    refuse_bypassed_top,
    refuse_caches,
    refuse_given,
    uses_positions,
    wants_weights,
    without_what_packing_drops,
)
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import modules
from autopack.inspection.heads import is_head_of_pair
from autopack.layout import pair as pairs
from autopack.layout.declarations import IGNORED_LABEL, LAYOUT_KWARGS, Declared
from autopack.layout.pair import Half, Pair
from autopack.runtime.scope import Scope, current, open_scope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.runtime.model import Enabled

__all__ = ["HalfEntryHook", "HalfExitHook", "PairEntryHook"]

_PASSED_ON = {"labels", "num_items_in_batch", "return_dict", "use_cache", "output_attentions", "output_hidden_states"}
_PASSED_ON |= {"output_router_logits"}
_DROPPED = {*unpadded.DROPPED, *LAYOUT_KWARGS, *pairs.DECLARATIONS}


class PairEntryHook(EntryHook):
    """Forward pre-hook of an encoder-decoder, or of one inside a model with another head."""

    def __init__(self, enabled: Enabled, level: int):
        super().__init__(enabled, level)
        self.has_other_head = is_head_of_pair(enabled.entries[level])
        self.reads_one_token_per_row = False

    def __call__(
        self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return _enter_pair(self, module, args, kwargs)


class HalfExitHook(ExitHook):
    """Forward hook of the models inside an encoder or decoder.

    Not traced, as their entry is not: T5's halves share one code, which Dynamo would read with the scope of the other.
    """

    @torch._dynamo.disable
    def __call__(self, module: PreTrainedModel, args: tuple[Any, ...], output: Any) -> Any:
        return super().__call__(module, args, output)


class HalfEntryHook(EntryHook):
    """Forward pre-hook of the models inside an encoder or decoder; on their own they are entered like any other."""

    def __init__(self, enabled: Enabled, level: int, decodes: bool):
        super().__init__(enabled, level)
        self.decodes = decodes

    @torch._dynamo.disable
    def __call__(
        self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        scope = current()
        if scope is not None and scope.owner is self.enabled and scope.pair is not None:
            return _enter_half(self, module, args, kwargs, scope)
        return super().__call__(module, args, kwargs)


@torch._dynamo.disable
def _enter_pair(
    hook: PairEntryHook, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    enabled, outer = hook.enabled, current()
    inside = outer is not None and outer.owner is enabled and outer.level < hook.level
    if outer is not None and inside and not outer.waits:
        outer.enter(hook.level)
        return None
    if not inside:
        refuse_bypassed_top(enabled, hook.level)
        enabled.refresh()
    arguments = by_name(type(module), args, kwargs)
    found = pairs.declared_of(arguments, getattr(module.config, "pad_token_id", None))
    if found is None:
        open_scope(Scope(enabled, None, outer, hook.level))
        return None
    pair, packs = found
    if not packs and enabled.unpad == "never":
        open_scope(Scope(enabled, None, outer, hook.level))
        return None
    if packs:
        _refuse_what_cannot_be_packed(hook, module, arguments, pair)
    else:
        reason = None if inside else _obstacle(hook, module, arguments, pair)
        waits = reason is None
        reason = reason or _obstacle_here(hook, module, arguments, pair)
        if reason is not None:
            waits = waits and any(modules.is_pair(entry) for entry in enabled.entries[hook.level + 1 :])
            if not waits:
                enabled.tally.left[reason] += 1
            open_scope(Scope(enabled, None, outer, hook.level, waits=waits))
            return None
        enabled.tally.count(*(half.places for half in pair.halves))
    enabled.check_sites()
    told = arguments.get("return_dict")
    pair = replace(pair, wants_tuple=not (told if told is not None else getattr(module.config, "return_dict", True)))
    call = _gather(hook, module, arguments, pair)
    open_scope(Scope(enabled, None, outer, hook.level, pair=pair))
    return (), call


def _obstacle(hook: PairEntryHook, module: PreTrainedModel, arguments: dict[str, Any], pair: Pair) -> str | None:
    """Why a padded batch has to stay as it came, whatever entry could unpad it."""
    enabled = hook.enabled
    if enabled.uses_positions and not all(half.places.on_the_right for half in pair.halves):
        return f"how {enabled.model_type} counts positions after padding is not known"
    weights = wants_weights(module, arguments)
    declared = Declared(None, labelled_padding=_labels_padding(arguments, pair.decoder))
    for half in pair.halves:
        reason = unpadded.obstacle(enabled, half.places, declared, module, arguments, hook, weights)
        if reason is not None:
            return reason
    return None


def _labels_padding(arguments: dict[str, Any], decoder: Half) -> bool:
    labels = arguments.get("labels")
    if not isinstance(labels, torch.Tensor) or tuple(labels.shape) != decoder.places.shape:
        return False
    if arguments.get("decoder_attention_mask") is None:
        return False  # what is padding follows from the labels
    padding = torch.from_numpy(~decoder.places.real).to(labels.device)
    return bool((labels[padding] != IGNORED_LABEL).any())


def _obstacle_here(hook: PairEntryHook, module: PreTrainedModel, arguments: dict[str, Any], pair: Pair) -> str | None:
    """Why this entry cannot run the halves as rows, although one further in may."""
    if hook.has_other_head:
        return "the head takes the padded form"
    foreign = unpadded.replaced_by(module)
    if foreign is not None:
        return f"{foreign} has replaced the forward"
    name = _without_a_place(hook, arguments, pair)
    return None if name is None else f"{name} has no place in a packed row"


def _without_a_place(hook: PairEntryHook, arguments: dict[str, Any], pair: Pair) -> str | None:
    for name, value in arguments.items():
        if name in _DROPPED or value is None or value is False or name == "encoder_outputs":
            continue
        if name not in hook.names and name not in _PASSED_ON and not isinstance(value, bool | int | float | str):
            return name
        if isinstance(value, torch.Tensor) and not _has_a_place(name, value, pair):
            return name
        if isinstance(value, tuple | list | dict):
            return name
    return None


def _has_a_place(name: str, value: torch.Tensor, pair: Pair) -> bool:
    half = _half_of(name, pair)
    return value.numel() == 1 or half is None or _is_of(half, name, value)


def _refuse_what_cannot_be_packed(
    hook: PairEntryHook, module: PreTrainedModel, arguments: dict[str, Any], pair: Pair
) -> None:
    refuse_caches(arguments)
    kind = type(module).__name__
    if hook.has_other_head:
        raise UnsupportedModel(
            f"{kind} gives one result per row, so the documents of a packed row would share one. Run them one per row."
        )
    if wants_weights(module, arguments):
        raise UnsupportedModel(
            f"{kind} was asked for attention weights with packed rows, where encoder and decoder have documents of "
            f"their own. Leave output_attentions out, or run the documents one per row."
        )
    # What an encoder has made already is a half of the call, whatever it was made of.
    refuse_given(hook.enabled, kind, {name: v for name, v in arguments.items() if name != "encoder_outputs"})
    homeless = _without_a_place(hook, arguments, pair)
    if homeless is not None:
        raise UnsupportedModel(
            f"{homeless} was given to {kind} with packed rows, and autopack does not know what of it belongs to which "
            f"document. Leave it out, or run the documents one per row."
        )


def _half_of(name: str, pair: Pair) -> Half | None:
    """The half that an argument is of, None for an encoder that runs as it is."""
    return pair.decoder if name.startswith("decoder_") or name == "labels" else pair.encoder


def _is_of(half: Half, name: str, value: torch.Tensor) -> bool:
    """Whether a tensor has something for every token of a half."""
    rows, columns = half.places.shape
    shape = tuple(value.shape[:2])
    return shape == (rows, columns) or (name.endswith("position_ids") and shape == (1, columns))


def _gather(hook: PairEntryHook, module: PreTrainedModel, arguments: dict[str, Any], pair: Pair) -> dict[str, Any]:
    """The arguments of the call on both rows."""
    call: dict[str, Any] = {}
    for name, value in arguments.items():
        positions = name.endswith("position_ids") and hook.enabled.uses_positions
        half = _half_of(name, pair)
        if name in _DROPPED and not positions and (half is not None or name in unpadded.CACHES):
            if name in hook.names:
                call[name] = None
            continue
        if half is not None and isinstance(value, torch.Tensor) and _is_of(half, name, value):
            value = half.places.gather(value.expand(half.places.rows, *value.shape[1:]))
        call[name] = value
    states = arguments.get("encoder_outputs")
    if states is not None and pair.encoder is not None:
        call["encoder_outputs"] = (pair.encoder.places.gather(states[0]),)
    if call.get("decoder_input_ids") is None and call.get("decoder_inputs_embeds") is None:
        call["decoder_input_ids"] = _shifted(module, call["labels"], pair.decoder)
    if "use_cache" in hook.names or getattr(module.config, "use_cache", False):
        call["use_cache"] = False
    return {**call, "return_dict": True}


def _shifted(module: PreTrainedModel, labels: torch.Tensor, decoder: Half) -> torch.Tensor:
    """The tokens that the model makes of the labels of each document alone: (1, tokens)."""
    shift = _shift_of(module)
    layout = decoder.layout
    document = layout.seq_idx[0].long().to(labels.device)
    column = layout.position_ids()[0].to(labels.device)
    alone = labels.new_full((len(layout.lengths), layout.max_seqlen), IGNORED_LABEL)
    alone[document, column] = labels[0]
    return shift(alone)[document, column][None]


def _shift_of(module: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """How a model makes its decoder's tokens of labels: by its method, or by the function that its forward calls."""
    method: Any = getattr(module, "prepare_decoder_input_ids_from_labels", None)
    if method is not None:
        return method
    function = getattr(sys.modules[type(module).__module__], "shift_tokens_right", None)
    if function is None:
        raise InvalidPacking(
            f"{type(module).__name__} does not say how it makes the decoder's tokens of labels, so autopack cannot "
            f"do it document by document. Pass decoder_input_ids."
        )
    wanted = list(inspect.signature(function).parameters)[1:]
    return lambda labels: function(labels, **{name: getattr(module.config, name) for name in wanted})


@torch._dynamo.disable
def _enter_half(
    hook: HalfEntryHook, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Scope
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert outer.pair is not None
    arguments = by_name(type(module), args, kwargs)
    encoder = outer.pair.encoder or _recordings(outer.pair, arguments)
    layout = outer.pair.decoder.layout if hook.decodes else encoder.layout
    inputs = inputs_of(arguments)
    if inputs is None or tuple(inputs.shape[:2]) != (1, layout.columns):
        found = "none" if inputs is None else tuple(inputs.shape)
        raise UnsupportedModel(
            f"{type(module).__name__} was to run on a row of {layout.columns} tokens and got {found}: its model "
            f"changes the tokens on their way. Train it on padded batches with autopack.enable(model, unpad='never')."
        )
    call = without_what_packing_drops(hook, module, arguments)
    if call.get("encoder_attention_mask") is not None:
        call["encoder_attention_mask"] = None
    if uses_positions(hook) and call.get("position_ids") is None:
        if not hook.takes_positions:
            raise UnsupportedModel(
                f"{type(module).__name__}.forward takes no position_ids, so positions cannot restart at each document"
            )
        numbering = hook.enabled.numbering[module.config.model_type]
        call["position_ids"] = layout.position_ids(numbering.first_position(module.config))
    memory = None
    if hook.decodes:
        memory = encoder.layout
        states = call.get("encoder_hidden_states")
        if isinstance(states, torch.Tensor) and tuple(states.shape[:2]) != (1, memory.columns):
            call["encoder_hidden_states"] = encoder.places.gather(states)
    open_scope(Scope(hook.enabled, layout, outer, hook.level, memory=memory))
    return (), call


def _recordings(pair: Pair, arguments: dict[str, Any]) -> Half:
    """What an encoder that ran as it is has made of its recordings, one per document, as one row."""
    states, mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
    documents = len(pair.decoder.layout.lengths)
    if not isinstance(states, torch.Tensor) or len(states) != documents:
        raise UnsupportedModel(
            f"the decoder reads {0 if states is None else len(states)} encoded recordings for {documents} documents. "
            f"Train the model on padded batches with autopack.enable(model, unpad='never')."
        )
    real = np.ones(states.shape[:2], dtype=bool)
    if isinstance(mask, torch.Tensor) and tuple(mask.shape) == real.shape:
        real = (mask != 0).cpu().numpy()
    return Half.of_documents(real & (np.cumsum(real, axis=1) == 1), real, states.device)

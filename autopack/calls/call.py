"""One call at one entry: its arguments by name, its declarations, and the plan of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from autopack.calls import prefixes
from autopack.calls.entry import Entry
from autopack.inspection import media
from autopack.layout import IGNORED_LABEL, declarations
from autopack.layout.declarations import Declared
from autopack.layout.host import noted_padding
from autopack.layout.packed import PackedLayout
from autopack.layout.prefixes import Prefixes
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import CACHES
from autopack.runtime.scope import Activation, Scope
from autopack.runtime.tally import Tally, Volume

logger = logging.getLogger(__name__)

DROPPED = (
    "attention_mask",
    "encoder_attention_mask",
    "cache_position",
    "batch_size",
    "seq_len",
    *CACHES,
)
"""Arguments that the model gets as None for a packed row.

ModernBERT's heads hand on the shape of their batch up to 5.0, and it makes inner masks of that.
"""
LAST_LOGITS = ("logits_to_keep", "num_logits_to_keep")
"""Arguments that ask for the logits of some tokens only."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward by position and by name."""
LABELS = ("labels", "shift_labels", "start_positions", "end_positions", "next_sentence_label")
"""Arguments that ask for a loss."""


class Call:
    """The arguments and declared documents of one call at an entry, before it has a plan."""

    def __init__(
        self,
        entry: Entry,
        module: PreTrainedModel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outer: Activation | None,
    ):
        self.entry = entry
        model: Any = entry.link.model
        self.model, self.traits, self.anatomy = model, model.traits, model.anatomy
        self.module, self.config = module, entry.config
        self.arguments: dict[str, Any] = {**dict(zip(entry.names, args, strict=False)), **kwargs}
        self.given = {name for name, value in self.arguments.items() if value is not None}
        """Names of the arguments that are not None."""
        self._by_position = args
        self.unnamed = max(0, len(args) - len(entry.names))
        """Number of arguments given by position beyond those that the forward names."""
        self.outer = outer
        """The activation of an outer entry that left the decision to this call, if any."""
        self._declared: Declared | None = None
        self.part: tuple[PackedLayout, slice] | None = None
        """The documents of rows that ranks share, and this call's columns; set by its plan."""
        self.prefixes: Prefixes | None = None
        """Common beginnings of the batch's rows that are to run once; found out with `declared`."""

    @property
    def name(self) -> str:
        """The class name of the called module."""
        return type(self.module).__name__

    @property
    def of_head(self) -> str | None:
        """Name of the outer head that made its packed documents this batch's rows, or None."""
        return None if self.outer is None else self.outer.plan.of_head

    def say_once(self, message: str, *values: Any) -> None:
        """Log a warning unless this model is silent or has logged this message, with any values."""
        model = self.model
        if message not in model.logged and not model.is_silent:
            model.logged.add(message)
            logger.warning(message, *values)

    def handed_on(self, arguments: dict[str, Any]) -> Arguments:
        """Return `arguments` as (args, kwargs), each by position or name as in the call."""
        by_name, names = dict(arguments), self.entry.names
        named = [by_name.pop(name, None) for name in names[: len(self._by_position)]]
        return (*named, *self._by_position[len(names) :]), by_name

    @cached_property
    def inputs(self) -> Tensor | None:
        """`input_ids`, else `inputs_embeds`, if a tensor (rows, columns, ...); None without one."""
        for name in ("input_ids", "inputs_embeds"):
            value = self.arguments.get(name)
            if isinstance(value, Tensor) and value.dim() >= 2:
                return value
        return None

    @cached_property
    def media(self) -> list[str]:
        """The names of the given arguments that hold images or other media."""
        return [] if self.given <= self.entry.plain_names else media.given(self.arguments)

    @property
    def brings_choices(self) -> bool:
        """True if a multiple-choice head gets tokens (questions, choices, columns, ...)."""
        head, inputs = self.entry.head, self.inputs
        if head is None or not head.of_choices or inputs is None:
            return False
        return inputs.dim() == 3 + inputs.is_floating_point()

    def choices_as_rows(self) -> dict[str, Any]:
        """Return the arguments (questions, choices, columns, ...) alone, a choice per row."""
        shape = () if self.inputs is None else self.inputs.shape[:3]
        return {
            n: v.flatten(0, 1)
            for n, v in self.arguments.items()
            if getattr(v, "shape", ())[:3] == shape
        }

    @property
    def declared(self) -> Declared:
        """Documents and padding that the arguments declare, read once; raises if they disagree."""
        # No cached property: up to Python 3.11 one waits for that of another call, and a twin may
        # be asked meanwhile.
        if self._declared is None:
            self._declared = self._read_declarations()
        return self._declared

    def _read_declarations(self) -> Declared:
        """Return the declared documents and padding; set `prefixes` if row beginnings run once.

        Raises `InvalidPacking` if a declaration is malformed or two of them disagree.
        """
        inputs, arguments = self.inputs, self.arguments
        if inputs is None:
            return Declared(None)
        if self.brings_choices:
            arguments, inputs = self.choices_as_rows(), inputs.flatten(0, 1)
        outer, here = self.outer, arguments.get("position_ids")
        made_inside = outer is not None and "position_ids" not in outer.plan.call.given
        # Three sections that an outer model has made, and not its caller, tell the places of
        # images' tokens, several of which may be at 0 (MiniCPM-V 4.7), and no documents.
        if made_inside and isinstance(here, Tensor) and here.dim() == 3 == len(here):
            arguments = {**arguments, "position_ids": None}
        rows, columns = inputs.shape[:2]
        traits, entry = self.traits, self.entry
        # Tokens get any positions of the call as they are, and nothing else reads them.
        as_they_are = not (traits.whole_model_reason or traits.counts_columns or self.media)
        any_positions = as_they_are and entry.head is None and entry.inner_head is None
        shares = prefixes.why_not(self.model) is None
        found = declarations.read(
            arguments,
            (rows, columns),
            inputs.device,
            traits.first_position,
            self.ignored_label,
            # Some models keep what they continue to themselves (RecurrentGemma).
            continues=self.continues or bool(self.arguments.get("use_cache")),
            any_positions=any_positions,
            with_tokens=shares,
        )
        found = found if self.noted is None else replace(found, real=self.noted)
        if shares and not found.jumps:
            self.prefixes = prefixes.found_in(self, found)
            if self.prefixes is not None and found.layout is None:
                found = replace(found, real=found.real_of((rows, columns)))
        return found

    @cached_property
    def noted(self) -> np.ndarray | None:
        """Mask of real tokens noted for `input_ids`; None with mask or labels, or if not causal."""
        anatomy = self.anatomy
        if not self.given.isdisjoint(("attention_mask", "position_ids", *LABELS)):
            return None
        # Without a mask that hides padding tokens would see it.
        is_unseen = anatomy.one_way and (anatomy.causal or self.traits.recurs)
        return noted_padding(self.arguments.get("input_ids")) if is_unseen else None

    @cached_property
    def continues(self) -> bool:
        """True if a given cache holds tokens, which the tokens of this call continue."""
        return any(map(_holds_tokens, map(self.arguments.get, self.given.intersection(CACHES))))

    def holds_served_media(self, name: str) -> bool:
        """Return True if argument `name` holds only media that documents of this family may have.

        Their features take the places of placeholders in the order of the documents, which a row of
        all tokens has too.
        """
        return (
            media.holds_media(name) and media.kinds(name, self.arguments[name]) <= self.traits.media
        )

    def why_media_meet(self, kind: str) -> str | None:
        """Return why a twin mixes documents by media of a kind; None if not, or with verify=False.

        The twin gets a power of two of them, at least as many as the call, since code may treat the
        tenth otherwise than the first.
        """
        if not self.model.options.verify:
            return None
        values = (self.arguments[name] for name in self.media)
        counts = [len(value) for value in values if isinstance(value, Tensor) and value.dim()]
        layout = None if self.entry.is_pair else self.declared.layout
        # As many as documents, or more, as far as the arguments tell.
        count = max(1, 0 if layout is None else len(layout.lengths), min(counts, default=0))
        return self.model.ask_twin("media", kind, max(4, 1 << (count - 1).bit_length()))

    @cached_property
    def has_labels(self) -> bool:
        """True if the call gives labels, so that the model computes a loss."""
        return not self.given.isdisjoint(LABELS)

    @property
    def ignored_label(self) -> int:
        """The label that the loss leaves out: the argument `ignore_index` or -100."""
        told = self.arguments.get("ignore_index")
        return told if isinstance(told, int) else IGNORED_LABEL

    @cached_property
    def padding(self) -> TokenMap:
        """Map of a padded batch's real tokens into one row; needs `declared.real` and `inputs`."""
        assert self.declared.real is not None
        assert self.inputs is not None
        return TokenMap.of_real(self.declared.real, self.inputs.device)

    @property
    def sides(self) -> list[tuple[str, np.ndarray]]:
        """Pairs (prefix of output names, mask of their real tokens (rows, columns)) of a batch."""
        return [("", self.padding.real)]

    @property
    def volume(self) -> Volume | None:
        """The call's rows, columns and tokens; None without tokens or with sizes of a graph."""
        if self.declared.layout is not None:
            return Volume.of_layout(self.declared.layout)
        if self.declared.real is not None:
            return Volume.of_batch(self.declared.real)
        shape = () if self.inputs is None else self.inputs.shape[: 3 if self.brings_choices else 2]
        # in a graph, a size may stand for any
        if not shape or not all(type(size) is int for size in shape):
            return None
        return Volume(1, prod(shape[:-1]), prod(shape), prod(shape), prod(shape[:-1]))

    def count(self, volume: Volume | None, instead_of: Volume | None = None) -> None:
        """Add `volume`, if known, to the model's tally; subtract `instead_of`, counted before."""
        if volume is None:
            return
        # Lightning trains what comes from `from_pretrained` in evaluation mode.
        trains = self.anatomy.entries[0].training or torch.is_grad_enabled()
        self.model.tally.count(volume, trains, instead_of)

    @property
    def labelled_padding(self) -> bool:
        """True if a padded batch has labels at padding, which count in the loss."""
        return self.declared.labelled_padding

    @cached_property
    def wants_last_logits(self) -> bool:
        """True if the call asks for the logits of some tokens only."""
        asked = map(self.arguments.get, self.given.intersection(LAST_LOGITS))
        return any(isinstance(value, Tensor) or value for value in asked)

    @cached_property
    def wants_weights(self) -> bool:
        """True if the call asks for attention weights."""
        return self.wants("output_attentions", self.config)

    @property
    def wants_states(self) -> bool:
        """True if the call asks for the states of layers."""
        return self.wants("output_hidden_states", self.config)

    @property
    def wants_router_loss(self) -> bool:
        """True if the call or a configuration asks for router logits, which may add a loss."""
        return self.wants("output_router_logits", self.config, *self.anatomy.configs)

    @property
    def wants_tuple(self) -> bool:
        """True if the call asks for a plain tuple, not an output with names."""
        return not self.wants("return_dict", self.config, otherwise=True)

    def wants(self, name: str, *configs: Any, otherwise: bool = False) -> bool:
        """Return argument `name` as a bool; if not given, True if one of `configs` has it set.

        `otherwise` is the value of a configuration without the field.
        """
        if name in self.given:
            return bool(self.arguments[name])
        return bool([config for config in configs if getattr(config, name, otherwise)])


def _holds_tokens(cache: Any) -> bool:
    """Return True if a cache holds tokens already."""
    if not hasattr(cache, "get_seq_length"):
        return bool(cache)
    try:
        return int(cache.get_seq_length()) > 0
    except ValueError:  # of recurrent states alone, which have no length
        return True


class CallPlan:
    """The decision about one call: its arguments, scope and output; it never changes.

    It says what the model gets (`arguments`, all by name; None if they stay as they came), what
    sites may read (`scope`), what the caller gets (`finish`), and why (`reason`, in words that
    follow "since"). `volume` is the size of the part of the call that runs, if it is counted here
    and not further in.
    """

    what = "runs as it came"
    """The outcome of the call, in words."""
    packs = False
    """True if this plan packs documents into rows, or makes batches of them from packed rows."""
    unpads = False
    """True if it runs a padded batch without its padding."""
    defers = False
    """True if an inner entry may still run the batch without its padding."""
    of_head: str | None = None
    """The head whose packed documents are this batch's rows, if they are and hold padding."""
    masks = False
    """True if the model keeps a padding mask for its own loss; inner models must not get it."""
    inside: tuple[Scope, TokenMap] | None = None
    """The scope of a row that the inner model runs in place of its own, and the map into it."""
    volume_apart: Volume | None = None
    """The volume that is counted if common beginnings run once per document after all."""

    def __init__(
        self,
        call: Call,
        reason: str,
        scope: Scope | None = None,
        arguments: dict[str, Any] | None = None,
        volume: Volume | None = None,
    ):
        self.call, self.reason, self.scope = call, reason, scope or Scope(call.model)
        self.arguments, self.volume = arguments, volume

    def count(self, tally: Tally) -> None:
        """If this plan unpads, add its volume to the tally; note its tokens for recomputation."""
        read = self.call.model.padding_read
        if self.unpads and read is not None:  # for checkpoints that run it again
            read.note_unpadded(self.call.inputs)
        if self.unpads and self.volume is not None:  # documents of a head are counted there
            tally.unpadded = tally.unpadded.plus(self.volume)

    def leave_apart(self, running: Activation) -> None:
        """Set `running.apart`, so that common beginnings run per document; correct its volume."""
        running.apart = True
        if running.volume is not None:
            before, running.volume = running.volume, self.volume_apart
            self.call.count(running.volume, instead_of=before)

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Return the output that the caller expects; None if the model's output is that already."""
        return None

    def rows_for_pooler(self, states: Tensor) -> Tensor | None:
        """Return states (rows, columns, ...) with one document per row; None if they stay as is.

        A pooler reads column 0 of them.
        """
        layout = self.scope.layout
        return None if layout is None else TokenMap.of_documents(layout).gather(states)

    def span_logits(self, output: Any) -> Tensor | None:
        """Return `output` with its logits at padding hidden, or None to leave it unchanged."""
        return None

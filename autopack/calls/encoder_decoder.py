"""Calls of encoder-decoders: the whole finds both halves' documents; each half runs as one row.

The whole runs in a scope without a layout, in which nothing may mix tokens. The encoder and the
decoder, models of their own, each have a scope with their layout. Cross-attention finds both
layouts in the decoder's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from autopack.calls import refusals
from autopack.calls.call import Call, CallPlan
from autopack.calls.outputs import restore, without
from autopack.calls.padding_rules import PASSED_ON, reasons_anywhere
from autopack.calls.rows import NOT_IN_ROWS, arguments_of_rows, gathered, has_a_place
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import modules, source
from autopack.layout import IGNORED_LABEL
from autopack.layout import pair as pairs
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout
from autopack.layout.pair import Half, Pair
from autopack.layout.token_map import TokenMap
from autopack.layout.ways import CACHES
from autopack.runtime.scope import Activation, Scope
from autopack.runtime.tally import Volume

DECLARED = {*NOT_IN_ROWS, *pairs.DECLARATIONS, "encoder_outputs"}
"""Arguments that rows of documents cannot use as they come: declarations, masks, caches, states."""
_OF_DECODER = (
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "decoder_attention_mask",
    "encoder_outputs",
)


class PairCall(Call):
    """Arguments and declared documents of one call of an encoder-decoder."""

    _found: tuple[list[np.ndarray] | None, Pair | None] | None = None

    def one_sided_layout(self) -> PackedLayout | None:
        """Return the encoder's layout if a per-row head makes the decoder's tokens; else None."""
        makes_tokens = self.entry.head is not None and self.given.isdisjoint(_OF_DECODER)
        return self.declared.layout if makes_tokens else None

    def find_pair(self) -> Pair | None:
        """Return both halves' documents, read once; None if the call neither packs nor pads.

        Raises `InvalidPacking` if a declaration is malformed or the halves do not match.
        """
        if self._found is None:
            given, halves = self.arguments, self.anatomy.halves
            decodes = not self.given.isdisjoint((*_OF_DECODER[:2], "labels"))
            if decodes and halves is not None and not modules.takes_tokens(halves[0]):
                # Tokens beside its images are none of its own.
                given = {
                    name: value
                    for name, value in given.items()
                    if name not in ("input_ids", "inputs_embeds")
                }
            self._found = pairs.declared_of(given, getattr(self.config, "pad_token_id", None))
        return self._found[1]

    @property
    def pair(self) -> Pair:
        """The documents of both halves; `find_pair()` must not return None."""
        pair = self.find_pair()
        assert pair is not None
        return pair

    @property
    def volume(self) -> Volume | None:
        """Rows, columns and tokens of both halves; None before `find_pair` and without tokens."""
        real = None if self._found is None else self._found[0]
        return None if real is None else Volume.of_batch(*real)

    @property
    def labelled_padding(self) -> bool:
        """True if labels at the decoder's padding count in a padded batch's loss."""
        return self.pair.labelled_padding

    @property
    def sides(self) -> list[tuple[str, np.ndarray]]:
        """Pairs (prefix of output names, mask of the real tokens of that half)."""
        encoder = self.pair.encoder
        of_encoder = [] if encoder is None else [("encoder", encoder.places.real)]
        return [*of_encoder, ("", self.pair.decoder.places.real)]

    def _hides_labels(self) -> bool:
        """Return True if the model makes decoder tokens of labels and masks some as padding.

        If the call brings the tokens, or a mask of single documents, it hides none.
        """
        labels, config = self.arguments.get("labels"), self.config
        # a mask of packed rows declares documents, and a document alone has none
        given = _OF_DECODER[: 2 if self.pair.packs else 3]
        if labels is None or not self.given.isdisjoint(given):
            return False
        if not source.hides_pad_in_decoder(source.class_of(self.module)):
            return False
        if config.decoder_start_token_id == config.pad_token_id:
            return True
        values, real = host_values(labels), self.pair.decoder.places.real
        hidden = (values == config.pad_token_id) | (values == IGNORED_LABEL)
        # the last label is no token of the decoder
        return bool((hidden[:, :-1] & real[:, 1:]).any())

    def obstacles(self) -> refusals.Obstacles:
        """Yield (reason, code) why no entry can run this call with one row for each half."""
        if self.traits.reads_encoder_tokens and self.given.isdisjoint(_OF_DECODER[:2]):
            yield "the model makes the decoder's tokens of the encoder's", "decoder-tokens"
        if self._hides_labels():
            yield (
                "a label is the padding token, or is ignored, and the model hides it from its "
                "decoder",
                "decoder-tokens",
            )
        if self.wants_router_loss:
            yield "the losses of its routers are over all columns, padding included", "output-asked"
        if self.wants_weights:
            yield "attention weights are wanted", "output-asked"

    def obstacles_here(self) -> refusals.Obstacles:
        """Yield (reason, code) why this entry, if not an inner one, cannot run halves as rows."""
        if self.entry.has_other_head:
            yield "the head takes the padded form", "result-per-row"
        if self.entry.foreign is not None and not self.pair.packs:
            yield f"{self.entry.foreign}, and takes the padded form", "other-code"
        for name, value in self.arguments.items():
            if name in DECLARED or value is None or value is False:
                continue
            half = half_of(name, self.pair)
            fits = (
                half is None
                or self.holds_served_media(name)
                or has_a_place(name, value, half.places)
            )
            known = (
                name in self.entry.names
                or name in PASSED_ON
                or isinstance(value, bool | int | float | str)
            )
            if not (known and fits):
                yield f"{name} has no place in a packed row", "argument-of-no-document"

    def why_padded_anywhere(self) -> Iterator[str]:
        """Yield the reasons why a padded batch has to stay padded at every entry."""
        for reason, _ in self.obstacles():
            yield reason
        if self.traits.uses_positions and not all(
            half.places.on_the_right for half in self.pair.halves
        ):
            yield f"how {self.anatomy.model_type} counts positions after padding is not known"
        for half in self.pair.halves:
            yield from reasons_anywhere(self, half.places)

    def check_packed(self) -> None:
        """Raise `AutopackError` if this entry or the call's arguments rule out packed rows."""
        refusals.refuse(self, self.obstacles(), self.obstacles_here())


class PairAsRows(CallPlan):
    """Plan that runs both halves of an encoder-decoder's call as one packed row each."""

    what = "runs as one packed row of the encoder's tokens and one of the decoder's"
    packs = True

    def __init__(self, call: PairCall):
        pair = self.pair = call.pair
        self.unpads = not pair.packs
        refusal = (
            "mixes tokens outside the encoder and the decoder of a packed call, where autopack "
            "does not know its documents. Train the model on padded batches, with "
            "autopack.enable(model, unpad=False)."
        )
        reason = "it declares documents" if pair.packs else "its masks hide padding"
        volume = Volume.of_row(
            len(pair.decoder.layout.lengths), *(half.places.real for half in pair.halves)
        )
        super().__init__(
            call, reason, Scope(call.model, refusal=refusal), _half_arguments(call, pair), volume
        )

    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Return the halves' output in the rows of the call; as a tuple if that is asked for."""
        output = without(output, self.scope.model.traits.leaves_out)
        restored = restore(output, self.pair, read=self.scope.model.padding_read)
        # inside, names tell the halves' outputs apart
        return restored.to_tuple() if self.call.wants_tuple else restored


class HalfAsRow(CallPlan):
    """Plan that runs one half, inside a `PairAsRows` call, as its packed row.

    The scope of a decoder holds the encoder's layout too. Raises `UnsupportedModel` if the half
    gets other tokens than its row.
    """

    what = "runs as the packed row of its half"

    def __init__(self, call: Call, pair: Pair):
        encoder = pair.encoder or _half_of_states(pair, call.arguments)
        layout = pair.decoder.layout if call.entry.decodes else encoder.layout
        if call.inputs is None or tuple(call.inputs.shape[:2]) != (1, layout.columns):
            found = "none" if call.inputs is None else tuple(call.inputs.shape)
            raise UnsupportedModel(
                f"{call.name} was to run on a row of {layout.columns} tokens and got {found}: its "
                "model changes the tokens on their way. Train it on padded batches with "
                "autopack.enable(model, unpad=False).",
                code="unpad-refused",
            )
        arguments = arguments_of_rows(call, layout)
        memory = encoder.layout if call.entry.decodes else None
        states = arguments.get("encoder_hidden_states")
        if memory and isinstance(states, Tensor) and states.shape[:2] != (1, memory.columns):
            arguments["encoder_hidden_states"] = encoder.places.gather(states)
        reason = "the call around it declares documents or hides padding"
        super().__init__(call, reason, Scope(call.model, layout, memory), arguments)


def _half_of_states(pair: Pair, arguments: dict[str, Any]) -> Half:
    """Return an encoder half of `encoder_hidden_states`; raise if they are not one per document.

    They are encoded recordings or images, whose encoder ran unchanged.
    """
    states, mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
    documents = len(pair.decoder.layout.lengths)
    if not isinstance(states, Tensor) or len(states) != documents:
        raise UnsupportedModel(
            f"the decoder reads {0 if states is None else len(states)} encoded recordings or "
            f"images for {documents} documents. Train the model on padded batches with "
            "autopack.enable(model, unpad=False).",
            code="unpad-refused",
        )
    real = np.ones(states.shape[:2], dtype=bool)
    if isinstance(mask, Tensor) and tuple(mask.shape) == real.shape:
        real = host_values(mask != 0)
    return Half(real, states.device)


def half_of(name: str, pair: Pair) -> Half | None:
    """Return the half that argument `name` belongs to; None for an encoder that runs unchanged."""
    return pair.decoder if name.startswith("decoder_") or name == "labels" else pair.encoder


def _half_arguments(call: PairCall, pair: Pair) -> dict[str, Any]:
    """Return the arguments of both halves' rows; decoder tokens are made of labels if missing."""
    entry = call.entry
    found: dict[str, Any] = {}
    for name, value in call.arguments.items():
        positions = name.endswith("position_ids") and call.traits.uses_positions
        half = half_of(name, pair)
        if name in DECLARED and not positions and (half is not None or name in CACHES):
            if name in entry.names:
                found[name] = None
            continue
        found[name] = value if half is None else gathered({name: value}, half.places)[name]
    states = call.arguments.get("encoder_outputs")
    if states is not None and pair.encoder is not None:
        found["encoder_outputs"] = BaseModelOutput(
            last_hidden_state=pair.encoder.places.gather(states[0])
        )
    if found.get("decoder_input_ids") is None and found.get("decoder_inputs_embeds") is None:
        # The tokens are made of each document's labels alone.
        labels, batch = found["labels"], TokenMap.of_documents(pair.decoder.layout)
        alone = batch.gather(labels).masked_fill(~batch.mask.to(labels.device), IGNORED_LABEL)
        found["decoder_input_ids"] = batch.restore(_shift_tokens_right_of(call.module)(alone))
    # The half that would fill a cache is kept from it.
    as_it_came = call.traits.masks_without_cache and "use_cache" not in call.given
    if not as_it_came and ("use_cache" in entry.names or getattr(call.config, "use_cache", False)):
        found["use_cache"] = False
    return {**found, "return_dict": True}


def _shift_tokens_right_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the model's function from labels to decoder tokens; raise if it has none."""
    method: Any = getattr(module, "prepare_decoder_input_ids_from_labels", None)
    if method is not None:
        return method
    modules = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    function = next(
        filter(None, (getattr(each, "shift_tokens_right", None) for each in modules)), None
    )
    if function is None:
        raise InvalidPacking(
            f"{type(module).__name__} does not say how it makes the decoder's tokens of labels, so "
            "autopack cannot do it document by document. Pass decoder_input_ids.",
            code="decoder-tokens",
        )
    wanted = list(inspect.signature(function).parameters)[1:]
    return lambda labels: function(
        labels, **{name: getattr(module.config, name) for name in wanted}
    )

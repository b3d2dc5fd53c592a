"""Strategies that keep modules that mix or count tokens within documents; a family names one for
each such class."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopack.errors import UnsupportedModel
from autopack.family import MixerCall, Way
from autopack.inspection import modules
from autopack.layout.token_map import Grouping, equally_long
from autopack.mixers import operations
from autopack.mixers.alone import Alone as Alone
from autopack.mixers.alone import run_documents_alone
from autopack.patching import Site


@dataclass(frozen=True)
class Rows(Way):
    """Strategy that runs a mixer on documents as right-padded rows of a batch.

    This is right for every causal mixer, and for embeddings of tokens, which do not recur but may
    count columns.
    """

    recurs: bool = True
    counts: bool = False
    grouping: Grouping | None = None

    def run(self, call: MixerCall) -> Any:
        call.check()
        return operations.run_per_document_row(call.by_documents, call.layout, self.grouping)


@dataclass(frozen=True)
class EqualRows(Rows):
    """Strategy `Rows` for equally long documents, for mixers whose results padding would change."""

    grouping: Grouping | None = equally_long
    reads_padding = True


@dataclass(frozen=True)
class AtOperations(Way):
    """Strategy for mixers that look back in `operations` alone, or in the one kernel `fused`.

    Releases before 5.23 have their kernels in other places, and use the strategy `before`. A run
    that calls neither raises `UnsupportedModel`.
    """

    operations: tuple[str, ...]
    fused: str | None = None
    before: Way = field(default_factory=Rows)

    def __post_init__(self) -> None:
        unknown = {*self.operations, self.fused} - {None, *operations.OPERATIONS}
        if unknown or not self.operations:
            raise ValueError(
                f"AtOperations takes names of {', '.join(operations.OPERATIONS)}; found "
                f"{', '.join(map(str, unknown)) or 'none'}. Serve other modules by ROWS."
            )

    def run(self, call: MixerCall) -> Any:
        call.check()
        with operations.keeping_documents_apart(call.layout) as arrived:
            output = call.by_documents(lambda tensor: tensor)
        missed = set(self.operations) - arrived
        if missed and self.fused not in arrived:
            raise UnsupportedModel(
                f"{type(call.mixer).__name__} was run without {', '.join(sorted(missed))}, where "
                "autopack keeps documents apart, so they may have been mixed. Train it on padded "
                "batches, one document per row.",
                code="other-code",
            )
        return output

    def here(self, module: str) -> Way:
        """Return this strategy if a Python module has all of the operations, else `before`."""
        return self if self.sites(module) else self.before

    def sites(self, module: str) -> list[Site]:
        """Return a site for each operation in a Python module; [] if one is missing."""
        found = importlib.import_module(module)
        if not all(callable(getattr(found, name, None)) for name in self.operations):
            return []
        names = [n for n in (*self.operations, self.fused) if n and hasattr(found, n)]
        return [Site(module, name, operations.adapt_operation) for name in names]


@dataclass(frozen=True)
class Restarting(Way):
    """Strategy for embeddings that count columns: each document gets a row's first ones.

    The module takes tokens (rows, columns, ...) or a shape, and returns (columns, channels) or
    (rows, columns, channels); the result is (rows, columns, channels).
    """

    reads_encoder_tokens: bool = False
    recurs = False
    counts = True

    def run(self, call: MixerCall) -> Tensor:
        layout = call.layout

        def change(name: str, value: Any) -> Any:
            # columns, in one row or one for each
            if name == "position_ids" and isinstance(value, Tensor):
                columns = torch.arange(layout.max_seqlen, dtype=value.dtype, device=value.device)
                if value.shape == (layout.columns, 1):  # Pegasus-X
                    return columns[:, None]
                return columns if value.dim() == 1 else columns[None]
            if name != call.first or value is None:
                return value
            if isinstance(value, Tensor):
                return value[:1, : layout.max_seqlen]
            # Some releases hand over what they do not read: BART's of 5.4 to 5.8 the builtin
            # `input`.
            return (
                torch.Size((1, layout.max_seqlen, *value[2:]))
                if isinstance(value, (tuple, list))
                else value
            )

        table = call.changed(change)
        table = table[0] if table.dim() == 3 else table
        return table[layout.derived("places", layout.position_ids).to(table.device)]


class RelativeBias(Way):
    """Strategy for T5's attention, which makes a bias of distances and hands it on to next layers.

    Distances are the same in every document, so each one's bias is the beginning of the longest
    one's, (1, heads, tokens, tokens). Upstream would make a bias for the whole row, and a dense one
    of zeros for cross-attention; there it is (1, heads, 1, 1).
    """

    recurs = False

    def run(self, call: MixerCall) -> Any:
        arguments, mixer, longest = dict(call.arguments), call.mixer, call.layout.max_seqlen
        if arguments.get("position_bias") is None:
            arguments["position_bias"] = _bias_of_longest(mixer, arguments, longest)
        if not modules.attention_modules(mixer):
            return _alone_with_bias(replace(call, arguments=arguments), arguments["position_bias"])
        return call.original(mixer, arguments.pop(call.first), **arguments)


def _alone_with_bias(call: MixerCall, bias: Tensor) -> Any:
    """Run attention on documents and parts of `bias`; return outputs with it whole, or raise."""
    place: set[int] = set()

    def original(mixer: nn.Module, states: Tensor, **given: Any) -> tuple[Any, ...]:
        output = call.original(mixer, states, **given)
        place.update(number for number, part in enumerate(output) if part is given["position_bias"])
        return tuple(None if number in place else part for number, part in enumerate(output))

    output = ALONE.run(replace(call, original=original), bias)
    if len(place) != 1:
        raise UnsupportedModel(
            f"{type(call.mixer).__name__} does not hand on the bias that it was given, which its "
            "next layers need. Train it on padded batches, one document per row.",
            code="attention-unknown",
        )
    return tuple(bias if number in place else part for number, part in enumerate(output))


def _bias_of_longest(mixer: Any, arguments: dict[str, Any], longest: int) -> Tensor:
    """Return the longest document's bias (1, heads, tokens, tokens), or (1, heads, 1, 1) zeros."""
    states = arguments["hidden_states"]
    if mixer.has_relative_attention_bias and arguments.get("key_value_states") is None:
        return mixer.compute_bias(longest, longest, device=states.device)
    # Reentrant checkpointing needs a gradient of something that is handed on, as it does upstream.
    needs_gradient = mixer.gradient_checkpointing and mixer.training
    return states.new_zeros((1, mixer.n_heads, 1, 1)).requires_grad_(needs_gradient)


@dataclass(frozen=True)
class OneByOne(Way):
    """Strategy for a whole model: it runs documents of one length as a batch, the last resort.

    `whole_model_reason` tells why nothing less will do.
    """

    whole_model_reason: str
    numbers_itself: bool = False
    attends = True
    recurs = False

    def run(self, call: MixerCall) -> Any:
        return run_documents_alone(call, self.numbers_itself)


class EncoderOneByOne(OneByOne):
    """Strategy `OneByOne` for an encoder; a decoder of its class runs unchanged, by its parts."""

    def run(self, call: MixerCall) -> Any:
        if getattr(call.mixer, "is_decoder", False):
            return call.changed(lambda name, value: value)
        return super().run(call)


ALONE, RELATIVE, RESTARTING, ROWS = Alone(), RelativeBias(), Restarting(), Rows()

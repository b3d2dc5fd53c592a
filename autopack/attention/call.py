"""A call of an attention function inside a packed forward, and the backends that can compute it: of
these, `eager` and `sdpa`, which call the function once per document.

Shapes, here and in backends: R rows of C columns, H heads (fewer of keys and values if queries
share them), E their size (V of values), L tokens of one document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopack.attention.compiled import attend_compiled
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import releases, torches
from autopack.inspection.foreign import is_of_library
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from autopack.layout.prefixes import Prefixes
from autopack.layout.token_map import Batches, equally_long

Output = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a model's attention function in a packed forward, with its documents' places.

    `query` is (R, H, C, E) in the columns of `layout`. `key` and `value` are in the columns of
    `memory`, if it is given (states of an encoder, or documents up to each query), or of `layout`.
    `original` is the function that the model calls, registered as `implementation`. `options` are
    its further arguments by name, without those that only declare documents.
    """

    original: Callable[..., Any]
    implementation: str
    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: DocumentMask | Tensor | None
    layout: PackedLayout
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: PackedLayout | None = None
    want_weights: bool = False

    @property
    def keys(self) -> PackedLayout:
        """The layout of keys and values."""
        return self.layout if self.memory is None else self.memory

    @property
    def is_causal(self) -> bool:
        """True if a missing mask means causal attention, by the call's option or the module."""
        told = self.options.get("is_causal")
        return bool(told if told is not None else getattr(self.module, "is_causal", True))

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (R, H, C, E) each."""
        return self.query, self.key, self.value

    def states_for_sdpa(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in the dtype to which SDPA casts them under autocast."""
        query, key, value = (each.to(torches.taken_by_sdpa(each)) for each in self.states)
        return query, key, value

    @property
    def replaces_sdpa(self) -> bool:
        """True if the user registered another function under transformers' name "sdpa"."""
        return self.implementation == "sdpa" and self.original is not releases.SDPA_FUNCTION

    @property
    def pattern(self) -> Pattern | None:
        """The tokens of its document that a token sees; None if the mask has no known rule."""
        if isinstance(self.mask, DocumentMask):
            return None if self.mask.absolute else self.mask.pattern
        return Pattern(causal=self.is_causal) if self.mask is None else None

    def options_with(self, mask: Tensor | None) -> Mapping[str, Any]:
        """Return the options for a call with one document's `mask`: their `is_causal` fits it.

        gpt2 and others conclude from the presence of a mask that the call need not be causal (up to
        4.57); the description of a mask is present even if a document alone would have none.
        """
        if self.options.get("is_causal") is None or not isinstance(self.mask, DocumentMask):
            return self.options
        causal = self.mask.pattern is not None and self.mask.pattern.causal
        return {**self.options, "is_causal": mask is None and causal}

    def refuse_two_directions(self) -> None:
        """Raise `UnsupportedModel` if mask and `is_causal` differ and stock may follow either.

        transformers leaves a mask out if it takes `is_causal` to express the same: for SDPA, and
        for functions that the user registers with its masks. Such a model attends one way with
        padding, and the other way without.
        """
        mask, told = self.mask, self.options.get("is_causal")
        if not isinstance(mask, DocumentMask) or mask.pattern is None or told is not None:
            return
        causal = mask.pattern.causal
        if causal == self.is_causal:
            return
        if mask.for_length(2) is None:
            raise UnsupportedModel(
                f"{type(self.module).__name__} has is_causal={self.is_causal}, but the model makes "
                f"a {'causal' if causal else 'bidirectional'} mask: stock attends by that mask "
                "where a batch has padding, and by is_causal where it has none. Say the same in "
                "model.config.is_causal, or load the model with attn_implementation='eager'.",
                code="two-directions",
            )

    def refuse_dense_mask(self, kernel: str) -> None:
        """Raise `UnsupportedModel` if the model made a mask itself, which `kernel` cannot take."""
        if self.mask is not None and not isinstance(self.mask, DocumentMask):
            raise UnsupportedModel(
                f"{type(self.module).__name__} hands {kernel} a mask of its own, of shape "
                f"{tuple(self.mask.shape)}; autopack cannot split it by documents. Load the model "
                "with attn_implementation='sdpa' or 'eager'.",
                code="backend-unavailable",
            )


@dataclass(frozen=True)
class Backend:
    """A way to compute attention within documents of packed rows.

    * `attend` attends within each document. It returns the output (R, C, H, V), and the attention
      weights (R, H, C, C), zero across documents, if they are wanted and the backend can give them.
    * `availability` tells whether the backend can be used on this machine, and by what or why not.
    * `refusal` returns why it cannot serve a call, or None.
    * `over_prefixes` attends in a row of S tokens that holds common beginnings of documents once,
      (1, S, H, V); it returns None for a call that it cannot serve.
    * For implementations of `stands_in`, `backend="auto"` takes it in place of their own backend
      whenever it can serve a call. Asking for it where it is not available is refused at once.
    * `devices` are the kinds of devices on which it runs.
    """

    attend: Callable[[AttentionCall], Output]
    availability: Callable[[], tuple[bool, str]]
    refusal: Callable[[AttentionCall], str | None] = lambda call: None
    over_prefixes: Callable[[AttentionCall, Prefixes], Tensor | None] | None = None
    stands_in: frozenset[str] = frozenset()
    devices: frozenset[str] | None = None  # None for all


# --- The model's own attention function, once per document.
#
# Nothing of size rows x columns x columns is made, and nothing needs to be known of the function:
# scale, grouped-query heads, softcap, sinks, biases, dropout and all else come along. This is the
# path of `sdpa` and `eager`, and of any attention function that the user registered.

_MANY, _SHORT = 4, 10
"""Least documents of each length, and most tokens of each document, by mean, for documents of
several lengths to be moved next to others of their length.

A step of 802 documents of 2 to 8 tokens was 1.09 times as fast for it with 256 channels, and 1.17
times with 128, on a single thread of a CPU; with 8 to 16 tokens it was no faster.
"""


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def attend(call: AttentionCall) -> Output:
    """Return (output, weights or None) by the model's own function, document by document."""
    layout, weights = call.layout, None
    groups = _batches_by_length(call)
    if groups is None:
        batches = layout.spans
        states = [_by_document(each, layout) for each in call.states]
    else:
        batches = tuple((0, 0, each.into[1]) for each in groups.maps)
        states = [
            [
                each.transpose(1, 2)
                for each in _grouped_by_length(each.transpose(1, 2), layout, groups)
            ]
            for each in call.states
        ]
    options: dict[str, Sequence[Tensor]] = {}
    for name, option in call.options.items():
        if isinstance(option, Tensor) and option.dim() > 1:
            options[name] = (
                [_slice_option(call, name, option, *place) for place in batches]
                if groups is None
                else _grouped_by_length(option.expand(layout.rows, -1), layout, groups)
            )
    outputs: list[Tensor] = []
    for number, (place, query, key, value) in enumerate(zip(batches, *states, strict=True)):
        row, first, end = place
        if isinstance(call.mask, DocumentMask):
            mask = call.mask.for_document(row, first, end)
        else:
            mask = slice_mask(call.mask, row, slice(first, end), slice(first, end))
        given = dict(call.options_with(mask))
        for name, parts in options.items():
            given[name] = parts[number]
        output, weight = call.original(call.module, query, key, value, mask, **given)
        outputs.append(output.flatten(0, 1))
        if call.want_weights and weight is not None:
            if weights is None:
                weights = weight.new_zeros(
                    layout.rows, weight.shape[1], layout.columns, layout.columns
                )
            weights[row, :, first:end, first:end] = weight[0]
    found = torch.cat(outputs)
    if groups is not None and len(batches) > 1:
        found = found.index_select(0, groups.back)
    return found.unflatten(0, (layout.rows, layout.columns)), weights


def _by_document(states: Tensor, layout: PackedLayout) -> Sequence[Tensor]:
    """Return states (R, H, C, E) split into one (1, H, L, E) per document.

    They are cut by `split`, whose backward puts the parts together at once; a backward of slices
    adds up a whole row for every document. A single row is not split off from others, which would
    copy it once more on the way back.
    """
    rows = states.split(1) if layout.rows > 1 else (states,)
    found: list[Tensor] = []
    for row, lengths in zip(rows, layout.lengths_by_row, strict=True):
        found += row.split(lengths, dim=2)
    return found


def _grouped_by_length(tokens: Tensor, layout: PackedLayout, groups: Batches) -> Sequence[Tensor]:
    """Return tokens (R, C, ...) as one tensor (documents, L, ...) per length of documents."""
    flat, maps = tokens.flatten(0, 1), groups.maps
    if len(maps) > 1:
        places = layout.derived(
            "order by length", lambda: torch.cat([each.where.reshape(-1) for each in maps])
        )
        flat = flat.index_select(0, places)
    parts = flat.split([each.sources.size for each in maps])
    return [part.unflatten(0, each.into) for part, each in zip(parts, maps, strict=True)]


def slice_mask(mask: Any, row: int, queries: slice, keys: slice) -> Tensor | None:
    """Return a document's part of a mask (R or 1, H or 1, queries or 1, keys); None for None."""
    if mask is None:
        return None
    rows = slice(row, row + 1) if mask.shape[0] > 1 else slice(None)
    return mask[rows, :, queries if mask.shape[2] > 1 else slice(None), keys]


def _slice_option(
    call: AttentionCall,
    name: str,
    option: Tensor,
    row: int,
    first: int,
    end: int,
) -> Tensor:
    """Return an option's part for one document; the whole option if it has no axis of columns."""
    rows, columns = call.layout.rows, call.layout.columns
    if name == "position_bias" and option.shape[-1] == call.layout.max_seqlen != columns:
        return option[..., : end - first, : end - first]  # that of the longest document
    own = option[row : row + 1] if option.shape[0] == rows > 1 else option
    if option.dim() == 4 and option.shape[-2:] == (columns, columns):
        return own[:, :, first:end, first:end]
    # sinks, gates
    if option.dim() == 4 and option.shape[2] == columns and _has_heads(call, name, option):
        return own[:, :, first:end]
    if option.shape[1] == columns and option.shape[0] in (1, rows):
        return own[:, first:end]
    return option


def _has_heads(call: AttentionCall, name: str, option: Tensor) -> bool:
    """Return True if an option's axes 1 and 2 are heads and columns; raise if that is unclear.

    Axis 2 of the option is as long as a row. In transformers' own attention, axis 1 is the heads
    whenever it is as long as there are heads. Raises `UnsupportedModel` if third-party code could
    mean the columns by it.
    """
    columns, length = call.layout.columns, option.shape[1]
    if length == columns == call.query.shape[1] and not is_of_library(type(call.module)):
        raise UnsupportedModel(
            f"{type(call.module).__name__} hands {name} of shape {tuple(option.shape)} to its "
            f"attention function for a row of {columns} tokens, and has {length} heads: autopack "
            "cannot tell heads from tokens. Add a token of padding to the row.",
            code="attention-unknown",
        )
    return length in (1, call.query.shape[1]) or length != columns


def _batches_by_length(call: AttentionCall) -> Batches | None:
    """Return batches of documents of one length, or None if each is to be cut out singly.

    Documents are cut out singly where more is cut than states and options per column, or moving
    tokens costs more than calls. Documents of a single length lie as in a batch already.
    """
    layout = call.layout
    documents, kinds = len(layout.lengths), len(set(layout.lengths))
    is_worth_it = documents >= _MANY * kinds and layout.bounds[-1] <= _SHORT * documents
    of_columns = (1, layout.columns), (layout.rows, layout.columns)
    alike = call.mask is None or (isinstance(call.mask, DocumentMask) and not call.mask.absolute)
    if not (kinds == 1 or is_worth_it) or call.want_weights or not alike:
        return None
    for option in call.options.values():
        has_axes = isinstance(option, Tensor) and option.dim() > 1
        if has_axes and option.shape not in of_columns:
            return None
    return Batches.grouped(layout, equally_long)


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def by_stretches(call: AttentionCall, prefixes: Prefixes) -> Tensor | None:
    """Return the output (1, S, H, V) of one call per stretch; None if masks cannot be made."""
    own = call.mask
    if (
        not isinstance(own, DocumentMask)
        or not releases.is_of_transformers(call.original)
        or own.for_last(1, 2) is None
    ):
        return None

    def up_to_each_stretch(states: Tensor) -> Iterator[Tensor]:
        parts = states.split(prefixes.lengths, dim=2)
        for first, *rest in (stretch.chain for stretch in prefixes.stretches):
            yield torch.cat([parts[first], *(parts[n] for n in rest)], 2) if rest else parts[first]

    states = up_to_each_stretch(call.key), up_to_each_stretch(call.value)
    queries = call.query.split(prefixes.lengths, dim=2)
    outputs = []
    for stretch, *given in zip(prefixes.stretches, queries, *states, strict=True):
        length = stretch.length
        mask = (
            own.for_last(length, stretch.depth + length)
            if stretch.depth
            else own.for_document(0, 0, length)
        )
        options = dict(call.options_with(mask))
        options.pop("position_ids", None)
        outputs.append(call.original(call.module, *given, mask, **options)[0])
    return torch.cat(outputs, dim=1)


def _attend_by_sdpa(call: AttentionCall) -> Output:
    """Return (output, weights) of `attend`, or, in compiled code, (output, None) of an operator."""
    pattern, options = call.pattern if torch.compiler.is_compiling() else None, call.options
    given = options.get("dropout") or options.get("position_bias") is not None
    if pattern is None or pattern.chunk is not None or call.replaces_sdpa or given:
        return attend(call)
    bounds, scaling = call.layout.slots_on_host, options.get("scaling")
    return attend_compiled(bounds, *call.states_for_sdpa(), pattern, scaling), None


EAGER = Backend(
    attend=attend,
    over_prefixes=by_stretches,
    availability=lambda: (True, "the model's own attention function"),
)
SDPA = Backend(
    attend=_attend_by_sdpa,
    over_prefixes=by_stretches,
    availability=lambda: (True, "torch.nn.functional.scaled_dot_product_attention"),
)

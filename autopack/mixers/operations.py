"""Strategy for mixers that look back only in functions of transformers that a CUDA kernel may
replace.

The mixer runs on the rows as they are, and its convolution and scan keep documents apart: a kernel
that takes the bounds of documents gets them; any other implementation runs on documents as rows.
So the projections, most of a mixer's work, see one row, and no kernel has to handle documents that
it is not told of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from autopack.family import check_tokens
from autopack.inspection import releases, torches
from autopack.layout.packed import PackedLayout
from autopack.layout.token_map import Batches, Grouping, Run, Spread
from autopack.patching import Site
from autopack.runtime.scope import current

Function = Callable[..., Any]
Arguments = dict[str, Any]


@contextmanager
def keeping_documents_apart(layout: PackedLayout) -> Iterator[set[str]]:
    """In this block of a forward, let operations follow `layout`; yield the set of names called."""
    activation, arrived = current(), set[str]()
    assert activation is not None
    before, activation.mixing = activation.mixing, (layout, arrived)
    try:
        yield arrived
    finally:
        activation.mixing = before


def adapt_operation(original: Function, site: Site) -> Function:
    """Return an operation that follows a running mixer's documents, and is `original` otherwise."""
    operation = OPERATIONS[site.path]

    @functools.wraps(original, updated=())
    def autopack_operation(*args: Any, **kwargs: Any) -> Any:
        activation = current()
        if activation is None or activation.mixing is None:
            return original(*args, **kwargs)
        layout, arrived = activation.mixing
        result = operation(original, layout, args, kwargs)
        if result is not None:
            arrived.add(site.path)
        return result

    return autopack_operation


def run_per_document_row(run: Run, layout: PackedLayout, group: Grouping | None = None) -> Any:
    """Run a causal mixer on documents as right-padded rows; return its results for the rows.

    Tokens after a document cannot change a causal mixer's results in it, so right-padded rows of a
    batch are right for every document. `group` makes the batches, by default of similar lengths:
    scans in Python take as many steps as the longest document of a batch has tokens. Results of
    `run` (documents, tokens, ...), alone or in a tuple, come back as (rows, columns, ...); anything
    else in a tuple comes from the last batch.
    """
    found = Batches.grouped(layout, group)
    return found.together([run(batch.gather) for batch in found.maps])


def _convolution(
    original: Function,
    layout: PackedLayout,
    args: Any,
    kwargs: Arguments,
) -> Any:
    """Return causal_conv1d_fn by documents, of (rows, channels, tokens) and (channels, width).

    A kernel that is not told of documents, or torch, gets them in one row, with zeros between them,
    as there are before the start of a row.
    """
    rest = {**torches.by_name(("hidden_states", "weight"), args), **kwargs, "seq_idx": None}
    hidden, weight, _ = map(rest.pop, ("hidden_states", "weight", "seq_idx"))
    before = weight.shape[-1] - 1
    check_tokens(hidden.transpose(1, 2).shape, layout, "causal_conv1d_fn")
    if _takes(original, "seq_idx"):
        if hidden.stride(1) != 1:  # with seq_idx, the kernel wants channels last
            hidden = hidden.transpose(1, 2).contiguous().transpose(1, 2)
        return original(hidden, weight, *args[2:], **rest, seq_idx=layout.seq_idx)
    tokens = hidden.transpose(1, 2).flatten(0, 1)
    places = layout.derived(("apart", before), lambda: _spaced_columns(layout, before))
    row = tokens.new_zeros(len(tokens) + before * (len(layout.sizes) - 1), tokens.shape[1])
    row = row.index_copy(0, places, tokens).t()[None]
    found = original(row, weight, *args[2:], **rest)[0].t().index_select(0, places)
    return found.unflatten(0, (layout.rows, layout.columns)).transpose(1, 2)


def _spaced_columns(layout: PackedLayout, before: int) -> torch.Tensor:
    """Return tokens' columns in one row with `before` zeros between documents: int64 (tokens,)."""
    number = np.repeat(np.arange(len(layout.sizes)), layout.sizes)
    return layout.upload(np.arange(len(number)) + before * number)


@dataclass(frozen=True)
class _Scan:
    """Callable that runs a scan by documents: `tokens` are its arguments with tokens on `axis`.

    Arguments go by their place or by their name, as they are passed. `bounds` is the name of the
    argument that tells the kernel of documents, or None if it takes none.
    """

    tokens: tuple[int | str, ...]
    axis: int
    bounds: str | None
    chunk: Callable[[int], int] | None = None
    """Fastest chunk in torch, by the length of the longest document; any chunk gives the same
    result."""

    def __call__(
        self,
        original: Function,
        layout: PackedLayout,
        args: Any,
        kwargs: Arguments,
    ) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        rows = {
            key: given[key].movedim(self.axis, 1)
            for key in self.tokens
            if given.get(key) is not None
        }
        for value in rows.values():
            check_tokens(value.shape, layout, "a scan")
        if self.chunk is not None and not releases.kernel_parameters(original):
            size = self.chunk(layout.max_seqlen)
            given["chunk_size"] = min(given.get("chunk_size", 64), size)

        def call(spread: Spread, **more: Any) -> Any:
            spreads = {key: spread(value).movedim(1, self.axis) for key, value in rows.items()}
            named = {**given, **spreads, **more}
            positional = [named.pop(place) for place in range(len(args))]
            output = original(*positional, **named)
            return _change_first(output, lambda part: part.movedim(self.axis, 1))

        if self.bounds is None or not _takes(original, self.bounds):
            found = run_per_document_row(call, layout)
        elif self.bounds == "seq_idx":
            found = call(lambda tensor: tensor, seq_idx=layout.seq_idx)
        else:
            cu_seqlens = layout.derived("int64 bounds", layout.cu_seqlens.long)
            flat = call(
                lambda tensor: tensor.reshape(1, -1, *tensor.shape[2:]), cu_seqlens=cu_seqlens
            )
            found = _change_first(
                flat, lambda part: part.reshape(layout.rows, layout.columns, *part.shape[2:])
            )
        return _change_first(found, lambda part: part.movedim(1, self.axis))


def _near_square_root(longest: int) -> int:
    """Return a chunk length near the square root of the longest document, at least 64.

    Work grows with the length of a chunk, and with the square of the number of chunks.
    """
    return int(max(64, 2 ** math.ceil(math.log2(longest) / 2)))


def _change_first(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a scan's output with `change` applied to its tensor; final states stay unchanged."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _run_fused(original: Function, layout: PackedLayout, args: Any, kwargs: Arguments) -> Any:
    """Return the output of a whole mixer's kernel given `seq_idx`, or None if it takes none."""
    return (
        original(*args, **{**kwargs, "seq_idx": layout.seq_idx})
        if _takes(original, "seq_idx")
        else None
    )


_NORMS = ("b_rms_weight", "c_rms_weight", "dt_rms_weight")


def _run_mamba_inner(original: Function, layout: PackedLayout, args: Any, kwargs: Arguments) -> Any:
    """Return mamba_inner_fn of (rows, 2 * channels, tokens) by documents, or None to do without it.

    It is a kernel for a whole mixer. None has the mixer go step by step, which gives the same
    unless this kernel norms B, C and the time step: mamba_ssm 2.3 norms the time step after its
    projection, the model before it, and its backward has no gradient of these norms. Then the
    kernel runs here as well, so that a document trains as it does alone.
    """
    if not releases.kernel_parameters(original) or all(kwargs.get(name) is None for name in _NORMS):
        return None
    states, *rest = args
    check_tokens(states.transpose(1, 2).shape, layout, "mamba_inner_fn")

    def run(spread: Spread) -> Any:
        rows = spread(states.transpose(1, 2))
        tokens = rows.shape[1]
        rows = F.pad(rows, (0, 0, 0, 1)) if tokens == 1 else rows  # its backward refuses one token
        return original(rows.transpose(1, 2), *rest, **kwargs)[:, :tokens]

    return run_per_document_row(run, layout)


_DELTA_RULE = _Scan(
    (0, 1, 2, "query", "key", "value", "g", "beta"),
    1,
    "cu_seqlens",
    lambda longest: max(16, 1 << (longest - 1).bit_length()),
)

OPERATIONS: dict[str, Function] = {
    "causal_conv1d_fn": _convolution,
    "mamba2_split_conv1d_scan_combined": _run_fused,
    "mamba2_chunk_scan": _Scan((0, 1, 3, 4, "z"), 1, "seq_idx", _near_square_root),
    "mamba_inner_fn": _run_mamba_inner,
    "mamba_selective_scan": _Scan((0, 1, 3, 4, "z"), -1, None),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": replace(_DELTA_RULE, chunk=lambda longest: 16),
}
"""Adaptations to documents of functions that mix tokens, by the names in transformers' modeling
files.

Each takes the function, the layout, and the positional and named arguments of a call.
"""


def _takes(operation: Function, name: str) -> bool:
    """Return True if a kernel takes an argument `name`; False if torch computes the operation."""
    return name in releases.kernel_parameters(operation)

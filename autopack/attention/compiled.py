"""Per-document SDPA as one operator, so that a compiled graph holds no lengths and serves every
layout.

The number of documents is a tensor shape and their lengths are values, both unknown to the graph.
The backward attends once more in each document, since an operator cannot keep what autograd saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from autopack.inspection.masks import Pattern

_UNLIMITED = 1 << 62  # tokens that no document has


class _CompileSettings(NamedTuple):
    """Further arguments of the operators: how far a token sees before and after itself, and the
    chunk size."""

    before: int
    after: int
    chunk: int
    scale: float


_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens"
_SETTINGS = "SymInt before, SymInt after, SymInt chunk, float scale"


def attend_compiled(
    cu_seqlens: Tensor, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, scale: float | None
) -> Tensor:
    """Attend within each document of states (R, H, C, E); returns (R, C, H, V).

    `cu_seqlens` lie on the host, whatever the device of the states: each layer reads them, and
    would otherwise wait for the device.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    reach = pattern.before, 0 if pattern.causal else pattern.after, pattern.chunk
    before, after, chunk = (_UNLIMITED if each is None else each for each in reach)
    return _document_attention(query, key, value, cu_seqlens, before, after, chunk, scale).transpose(1, 2)


def _places(cu_seqlens: Tensor, columns: int, chunk: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the place of each document, or of each chunk of one, in (R, H, C)."""
    for first, end in pairwise(cu_seqlens.tolist()):
        row, column = divmod(first, columns)
        stop = column + end - first
        for start in range(column, stop, chunk):
            yield slice(row, row + 1), slice(None), slice(start, min(start + chunk, stop))


def _attend_in_document(query: Tensor, key: Tensor, value: Tensor, settings: _CompileSettings) -> Tensor:
    """Attend in one document, or in one chunk of it; states are (1, H, L, E)."""
    length, causal, mask = query.shape[2], settings.after == 0, None
    if settings.before < length - 1 or 0 < settings.after < length - 1:
        index = torch.arange(length, device=query.device)
        distance = index[:, None] - index
        mask, causal = (distance <= settings.before) & (-distance <= settings.after), False
    if key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=settings.scale,
    )


@torch.library.custom_op(
    "autopack::document_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_SETTINGS}) -> Tensor",
)
def _document_attention(*inputs: Any) -> Tensor:
    """Attend within each document; the operator that a compiled graph holds."""
    (query, key, value, cu_seqlens), settings = inputs[:4], _CompileSettings(*inputs[4:])
    output = query.new_empty(*query.shape[:3], value.shape[3])
    for here in _places(cu_seqlens, query.shape[2], settings.chunk):
        output[here] = _attend_in_document(query[here], key[here], value[here], settings)
    return output


@torch.library.custom_op(
    "autopack::document_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
def _document_attention_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, document by document."""
    (query, key, value, cu_seqlens), settings = inputs[:4], _CompileSettings(*inputs[4:])
    grads = tuple(t.new_empty(t.shape) for t in (query, key, value))
    for here in _places(cu_seqlens, query.shape[2], settings.chunk):
        # Autograd is off inside an operator, also under `enable_grad`; a transform of its own is
        # not.
        backward: Any = torch.func.vjp(
            partial(_attend_in_document, settings=settings), query[here], key[here], value[here]
        )[1]
        for whole, part in zip(grads, backward(grad[here]), strict=True):
            whole[here] = part
    return grads


@_document_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@_document_attention_backward.register_fake
def _(grad: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in others[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_document_attention_backward(grad, *ctx.saved_tensors, *ctx.settings), None, *(None for _ in ctx.settings)


_document_attention.register_autograd(_backward, setup_context=_setup_context)

"""Per-document SDPA as one operator, so that a compiled graph holds no lengths and is the same for every layout.

The number of documents is a tensor shape and their lengths are values, both unknown to the graph. The backward
recomputes the weights of each document, since an operator cannot keep what autograd saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.nn import functional as F

from autopack.inspection.masks import Pattern

__all__ = ["attend_compiled"]


def attend_compiled(
    cu_seqlens: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    scale: float | None,
) -> torch.Tensor:
    """Attend within each document of (rows, heads, columns, head size) states; returns (rows, columns, heads, size)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    before = -1 if pattern.before is None else pattern.before
    after = -1 if pattern.after is None else pattern.after
    chunk = 0 if pattern.chunk is None else pattern.chunk
    output = _document_attention(query, key, value, cu_seqlens, pattern.causal, before, after, chunk, scale)
    return output.transpose(1, 2)


def _spans(cu_seqlens: torch.Tensor, columns: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    bounds = cu_seqlens.tolist()
    for first, end in pairwise(bounds):
        row, column = divmod(first, columns)
        stop = column + end - first
        for start in range(column, stop, chunk or end - first):
            yield row, start, min(start + (chunk or end - first), stop)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, before: int, after: int, scale: float
) -> torch.Tensor:
    length = query.shape[2]
    mask = None
    if 0 <= before < length - 1 or 0 <= after < length - 1:
        index = torch.arange(length, device=query.device)
        distance = index[:, None] - index[None, :]
        mask = distance <= before if before >= 0 else torch.ones_like(distance, dtype=torch.bool)
        if causal:
            mask = mask & (distance >= 0)
        elif after >= 0:
            mask = mask & (-distance <= after)
    if key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal and mask is None, scale=scale
    )


@torch.library.custom_op("autopack::document_attention", mutates_args=())
def _document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    causal: bool,
    before: int,
    after: int,
    chunk: int,
    scale: float,
) -> torch.Tensor:
    output = query.new_empty(*query.shape[:3], value.shape[3])
    for row, first, end in _spans(cu_seqlens, query.shape[2], chunk):
        here = slice(row, row + 1), slice(None), slice(first, end)
        output[here] = _attend(query[here], key[here], value[here], causal, before, after, scale)
    return output


@_document_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    causal: bool,
    before: int,
    after: int,
    chunk: int,
    scale: float,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op("autopack::document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    causal: bool,
    before: int,
    after: int,
    chunk: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = tuple(t.new_empty(t.shape) for t in (query, key, value))
    for row, first, end in _spans(cu_seqlens, query.shape[2], chunk):
        here = slice(row, row + 1), slice(None), slice(first, end)
        parts = _gradients(grad[here], query[here], key[here], value[here], causal, before, after, scale)
        for whole, part in zip(grads, parts, strict=True):
            whole[here] = part
    return grads[0], grads[1], grads[2]


_QUERIES = 512
"""Queries of a document whose scores are held at a time: memory grows with its length and not with its square."""


def _gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    before: int,
    after: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `_attend`, written out: autograd is off inside an operator, whatever `enable_grad` says."""
    length, shared, dtype = query.shape[2], key.shape[1], torch.promote_types(query.dtype, torch.float32)
    # (1, key heads, query heads that share it, tokens, size)
    grad, query = (t.to(dtype).unflatten(1, (shared, -1)) for t in (grad, query))
    key, value = (t.to(dtype).unsqueeze(2) for t in (key, value))
    d_query, d_key, d_value = (torch.zeros_like(t) for t in (query, key, value))
    index = torch.arange(length, device=query.device)
    for first in range(0, length, _QUERIES):
        end = min(first + _QUERIES, length)
        low = max(0, first - before) if before >= 0 else 0
        high = end if causal else min(length, end + after) if after >= 0 else length
        q, k, v, g = query[..., first:end, :], key[..., low:high, :], value[..., low:high, :], grad[..., first:end, :]
        distance = index[first:end, None] - index[None, low:high]
        hidden = distance < (0 if causal else -after if after >= 0 else -length)
        if before >= 0:
            hidden = hidden | (distance > before)
        weights = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        d_value[..., low:high, :] += (weights.mT @ g).sum(2, keepdim=True)
        d_weights = g @ v.mT
        d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * scale
        d_query[..., first:end, :] = d_scores @ k
        d_key[..., low:high, :] += (d_scores.mT @ q).sum(2, keepdim=True)
    return d_query.flatten(1, 2), d_key.squeeze(2), d_value.squeeze(2)


@_document_attention_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    causal: bool,
    before: int,
    after: int,
    chunk: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx, grad):
    query, key, value, cu_seqlens = ctx.saved_tensors
    grads = _document_attention_backward(grad, query, key, value, cu_seqlens, *ctx.settings)
    return (*grads, None, None, None, None, None, None)


_document_attention.register_autograd(_backward, setup_context=_setup_context)

"""Attention within documents as one operator, so that a compiled graph holds no lengths and serves
every layout.

The backward attends once more, since an operator cannot keep what autograd saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopack.inspection.masks import Pattern

_UNLIMITED = 1 << 62  # tokens that no document has
_TAKEN = (
    "Tensor query, Tensor key, Tensor value, Tensor bounds, SymInt before, SymInt after, float "
    "scale"
)


def attend_compiled(
    bounds: Tensor, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, scale: float | None
) -> Tensor:
    """Return attention (R, C, H, V) within each document of states (R, H, C, E), by one operator.

    `bounds` lie on the host, whatever the device of the states: each layer reads them, and would
    otherwise wait for the device.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    settings = *pattern.reach(_UNLIMITED), scale
    return _operator(query, key, value, bounds, *settings).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
    """Return (R, H, C, V) by an SDPA call per document; `settings` are `_TAKEN`'s last four."""
    bounds, before, after, scale = settings
    shared, lengths = query.shape[1] // key.shape[1], bounds.diff().tolist()
    states = query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    # All heads' states of all rows, cut into documents: (H, L, E).
    documents = zip(
        *(each.transpose(0, 1).flatten(1, 2).split(lengths, 1) for each in states), strict=True
    )
    found = []
    for q, k, v in documents:
        length, causal, mask = q.shape[1], after == 0, None
        if before < length - 1 or 0 < after < length - 1:
            index = torch.arange(length, device=query.device)
            distance = index[:, None] - index
            mask, causal = (distance <= before) & (-distance <= after), False
        found.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        )
    rows, columns = len(query), query.shape[2]
    return torch.cat(found, 1).unflatten(1, (rows, columns)).transpose(0, 1).contiguous()


@torch.library.custom_op("autopack::attend", mutates_args=(), schema=f"({_TAKEN}) -> Tensor")
def _operator(*inputs: Any) -> Tensor:
    """Return `_attend` of the inputs, as the operator that a compiled graph holds."""
    return _attend(*inputs)


_GRADIENTS = f"(Tensor gradient, {_TAKEN}) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("autopack::attend_backward", mutates_args=(), schema=_GRADIENTS)
def _gradients(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, for which `_attend` runs once more."""
    # Autograd is off inside an operator, also under `enable_grad`; a transform of its own is not.
    backward: Any = torch.func.vjp(lambda *states: _attend(*states, *inputs[3:]), *inputs[:3])[1]
    return tuple(each.contiguous() for each in backward(gradient))


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@_gradients.register_fake
def _(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in inputs[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(gradient, *ctx.saved_tensors, *ctx.settings), *(None,) * 4


_operator.register_autograd(_backward, setup_context=_setup_context)

"""Short causal convolutions and the selective scan of Mamba over the documents of packed rows, in
torch alone.

For the scan (arXiv 2312.00752, algorithm 2) tokens are ordered as recurrent networks order packed
sequences: the first of every document, then the second of every document that has one, and so on,
longer documents first. A step then takes all documents that still run, without padding, and there
are as many steps as the longest document has tokens. The backward pass is the same recurrence
backwards; a graph of single steps would add up gradients of the whole row at each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import silu, softplus

from autopack.layout.packed import PackedLayout


def _steps(layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the tokens of the flattened rows in the order of steps, its inverse, and the bounds of
    steps.

    The bounds are where each step begins in that order and where the last one ends. Steps never get
    longer.
    """
    lengths = layout.sizes
    rank = np.empty(len(lengths), dtype=np.int64)
    rank[np.argsort(-lengths, kind="stable")] = np.arange(len(lengths))
    offsets = np.arange(layout.bounds[-1]) - np.repeat(layout.bounds[:-1], lengths)
    order = np.lexsort((np.repeat(rank, lengths), offsets))
    bounds = [0, *np.cumsum(np.bincount(offsets)).tolist()]
    return layout.upload(order), layout.upload(np.argsort(order, kind="stable")), bounds


class LinearRecurrence(torch.autograd.Function):
    """Recurrence h_t = decay_t * h_(t-1) + inputs_t from h = 0, on floats (tokens, ...) in step
    order.

    `bounds` are where each step begins and the last one ends. The first entries of a step continue
    the entries of the step before.
    """

    @staticmethod
    def forward(decay: torch.Tensor, inputs: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        states = inputs.clone()
        for i in range(len(bounds) - 2):
            start, middle, end = bounds[i : i + 3]
            before = states[start : start + end - middle]
            states[middle:end].addcmul_(decay[middle:end], before)
        return states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        decay, _, ctx.bounds = inputs
        ctx.save_for_backward(decay, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (decay, states), bounds = ctx.saved_tensors, ctx.bounds
        if torch.is_grad_enabled():
            return *_gradients(decay, states, gradient, bounds), None
        gradient = gradient.clone()
        for_decay = torch.zeros_like(decay)
        for i in range(len(bounds) - 3, -1, -1):
            start, middle, end = bounds[i : i + 3]
            before = slice(start, start + end - middle)
            gradient[before].addcmul_(decay[middle:end], gradient[middle:end])
            torch.mul(gradient[middle:end], states[before], out=for_decay[middle:end])
        return for_decay, gradient, None


def _gradients(
    decay: torch.Tensor, states: torch.Tensor, gradient: torch.Tensor, bounds: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of decay and inputs, step by step and not in place, so they can be
    differentiated."""
    sizes = [end - start for start, end in pairwise(bounds)]
    decays, before, parts = (list(each.split(sizes)) for each in (decay, states, gradient))
    for_decay = [torch.zeros_like(each) for each in decays]
    for i in range(len(sizes) - 2, -1, -1):
        later = sizes[i + 1]
        for_decay[i + 1] = parts[i + 1] * before[i][:later]
        parts[i] = torch.cat([parts[i][:later] + decays[i + 1] * parts[i + 1], parts[i][later:]])
    return torch.cat(for_decay), torch.cat(parts)


def selective_scan(
    layout: PackedLayout,
    hidden: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
) -> torch.Tensor:
    """Return transformers' own selective scan in torch of each document alone: (rows, channels,
    tokens).

    `hidden`, `dt` and `z` are (rows, channels, tokens), `B` and `C` (rows, states, tokens), `A`
    (channels, states), `D` and `delta_bias` (channels,). States are float32, the output has the
    dtype of `hidden`.
    """
    order, back, bounds = layout.derived("steps", lambda: _steps(layout))

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).flatten(0, 1).index_select(0, order)

    tokens, dt, B, C = (ordered(tensor) for tensor in (hidden, dt, B, C))
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)
    if delta_softplus:
        dt = softplus(dt)
    decay = torch.exp(A * dt[:, :, None])
    inputs = dt[:, :, None] * B[:, None, :].float() * tokens[:, :, None].float()
    states = LinearRecurrence.apply(decay, inputs.to(decay.dtype), bounds)
    output = torch.matmul(states.to(hidden.dtype), C[:, :, None])[:, :, 0].index_select(0, back)
    output = output.unflatten(0, (layout.rows, layout.columns)).transpose(1, 2)
    if D is not None:
        output = output + hidden * D[None, :, None]
    return output if z is None else output * silu(z)


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(tokens: torch.Tensor, weight: torch.Tensor, outside: list[torch.Tensor]) -> torch.Tensor:
        output = tokens * weight[:, -1]
        for lag, without in enumerate(outside, start=1):
            tap = tokens[:-lag] * weight[:, -1 - lag]
            output[lag:].add_(tap.index_fill_(0, without, 0))
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        tokens, weight, ctx.outside = inputs
        ctx.save_for_backward(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        for_tokens = gradient * weight[:, -1]
        for_weight = torch.zeros_like(weight)
        for_weight[:, -1] = (gradient * tokens).sum(0)
        for lag, without in enumerate(ctx.outside, start=1):
            seen = gradient[lag:].index_fill(0, without, 0)
            for_tokens[:-lag].addcmul_(seen, weight[:, -1 - lag])
            # In place only where this is not differentiated again: that would need what it was.
            seen = seen * tokens[:-lag] if torch.is_grad_enabled() else seen.mul_(tokens[:-lag])
            for_weight[:, -1 - lag] = seen.sum(0)
        return for_tokens, for_weight, None


def causal_convolution(
    layout: PackedLayout,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return a depthwise causal convolution of each document alone: (rows, channels, tokens), dtype
    of `hidden`.

    A tap that reaches past the start of its document counts as zero, as at the start of a row.
    Tokens stay in rows of channels, as the projections before and after have them, so each tap is
    one pass over contiguous memory. That makes up for the masking, since the backward pass of
    `conv1d` with one channel per group is slow on CPUs.

    `hidden` is (rows, channels, tokens), `weight` (channels, width), `bias` (channels,). Sums are
    taken in float32 or better.
    """
    width = weight.shape[-1]
    outside = layout.derived(("outside", width), lambda: _outside(layout, width))
    precise = torch.promote_types(weight.dtype, torch.float32)
    tokens = hidden.transpose(1, 2).flatten(0, 1).to(precise)
    output = _CausalConvolution.apply(tokens, weight.to(precise), outside)
    if bias is not None:
        output = output + bias
    output = output.to(weight.dtype)
    if activation is not None:
        output = activation(output)
    return output.unflatten(0, (layout.rows, layout.columns)).transpose(1, 2).to(hidden.dtype)


def _outside(layout: PackedLayout, width: int) -> list[torch.Tensor]:
    """Return, for each lag below `width`, the tokens whose successor by that lag is of another
    document.

    Tokens count from 0 over the flattened rows.
    """
    offsets = np.arange(layout.bounds[-1]) - np.repeat(layout.bounds[:-1], layout.sizes)
    lags = range(1, min(width, len(offsets)))
    return [layout.upload(np.flatnonzero(offsets[lag:] < lag)) for lag in lags]

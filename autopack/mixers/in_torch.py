"""Short causal convolutions over the documents of packed rows, in torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autopack.layout.packed import PackedLayout


class _CausalConvolution(torch.autograd.Function):
    """A causal depthwise convolution that does not reach into the document before."""

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

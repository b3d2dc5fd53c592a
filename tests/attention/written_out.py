"""Attention within documents written out, and small states for it: what kernels and operators are
compared with."""

from functools import partial

import torch
from torch.nn import functional as F

from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout

LAYOUT = PackedLayout.from_lengths([[5, 1, 9], [8, 7]])
PATTERNS = {
    "causal": Pattern(causal=True),
    "bidirectional": Pattern(causal=False),
    "window": Pattern(causal=True, before=3),
    "two-sided window": Pattern(causal=False, before=2, after=2),
    "chunks": Pattern(causal=True, chunk=4),
}


def states(size=16, value_size=None, dtype=torch.float64):
    """Queries of four heads, keys and values of two, which want gradients."""
    generator = torch.Generator().manual_seed(0)
    wanted = ((4, size), (2, size), (2, value_size or size))
    drawn = [
        torch.randn(2, heads, 15, width, generator=generator, dtype=torch.float64)
        for heads, width in wanted
    ]
    return [each.to(dtype).requires_grad_() for each in drawn]


def reference(layout, query, key, value, pattern, scale):
    """Dense attention in float32 or float64, one document at a time."""
    parts = []
    for row, first, end in layout.spans:
        exact = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (t[row, :, first:end].to(exact) for t in (query, key, value))
        index = torch.arange(end - first, device=q.device)
        distance = index[:, None] - index[None, :]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if pattern.causal:
            hidden |= distance < 0
        if pattern.before is not None:
            hidden |= distance > pattern.before
        if pattern.after is not None:
            hidden |= -distance > pattern.after
        if pattern.chunk is not None:
            hidden |= index[:, None] // pattern.chunk != index[None, :] // pattern.chunk
        bias = torch.zeros(len(q), *hidden.shape, device=q.device, dtype=exact).masked_fill(
            hidden, float("-inf")
        )
        found = F.scaled_dot_product_attention(
            *(t[None] for t in (q, k, v, bias)), scale=scale, enable_gqa=True
        )
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts).unflatten(0, (layout.rows, layout.columns))


attended = partial(reference, LAYOUT)
"""What each document of `LAYOUT` gets by itself, (rows, columns, heads, width)."""

"""Attention within documents written out, and small states for it: what kernels and operators are compared with."""

from __future__ import annotations

import torch

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
    drawn = [torch.randn(2, heads, 15, width, generator=generator, dtype=torch.float64) for heads, width in wanted]
    return [each.to(dtype).requires_grad_() for each in drawn]


def attended(query, key, value, pattern, scale, sinks=None):
    """What each document of `LAYOUT` gets by itself, (rows, columns, heads, width)."""
    number, offset = LAYOUT.seq_idx, LAYOUT.position_ids()
    distance = offset[:, :, None] - offset[:, None, :]
    seen = number[:, :, None] == number[:, None, :]
    if pattern.causal:
        seen &= distance >= 0
    if pattern.before is not None:
        seen &= distance <= pattern.before
    if pattern.after is not None:
        seen &= -distance <= pattern.after
    if pattern.chunk is not None:
        seen &= offset[:, :, None] // pattern.chunk == offset[:, None, :] // pattern.chunk
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(2, -1, 15, 1)], dim=-1)
    return (scores.softmax(-1)[..., :15] @ value).transpose(1, 2)

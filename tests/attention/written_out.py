"""Attention within documents written out, and small states for it: what kernels and operators are
compared with."""

from functools import partial

import torch

from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from tests.gpu.test_varlen import reference

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


attended = partial(reference, LAYOUT)
"""What each document of `LAYOUT` gets by itself, (rows, columns, heads, width)."""

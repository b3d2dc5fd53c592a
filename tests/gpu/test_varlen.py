"""torch's variable-length kernels against attention of each document alone, computed in float32."""

import pytest
import torch
from torch.nn import functional as F

from autopack.attention.backends.varlen import attend_varlen
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout

DEVICE = "cuda"
ROWS = [[7, 130, 1, 62, 256], [200, 200, 56]]
# One rounding of the output in the dtype (2^-8 or 2^-11 of values of order 1 to 4), and those of P
# and dS inside.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}


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


def _states(dtype, heads=8, kv_heads=2, size=64, value_size=64):
    layout = PackedLayout.from_lengths(ROWS, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(h, d):
        states = torch.randn(layout.rows, h, layout.columns, d, generator=generator, device=DEVICE)
        return states.to(dtype).requires_grad_()

    return layout, draw(heads, size), draw(kv_heads, size), draw(kv_heads, value_size)


def _compare(layout, states, pattern, scale, dtype):
    found = attend_varlen(layout, *states, pattern, scale)
    expected = reference(layout, *states, pattern, scale)
    weights = torch.randn(
        expected.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE
    )
    gradients = torch.autograd.grad((found.float() * weights).sum(), states)
    wanted = torch.autograd.grad((expected * weights).sum(), states)
    for name, f, w in zip(
        ("output", "q", "k", "v"), (found, *gradients), (expected, *wanted), strict=True
    ):
        error = float((f.float() - w.float()).abs().max() / w.float().abs().max())
        assert error <= TOLERANCE[dtype], f"{name} is off by {error:.1e} of its largest value"


PATTERNS = {
    "causal": Pattern(causal=True),
    "bidirectional": Pattern(causal=False),
    "window": Pattern(causal=True, before=31),
    "two-sided window": Pattern(causal=False, before=16, after=16),
    "chunks": Pattern(causal=True, chunk=48),
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_equals_each_document_alone(pattern, dtype):
    layout, *states = _states(dtype)
    _compare(layout, states, pattern, 0.2, dtype)


@pytest.mark.parametrize("sizes", [(16, 12), (192, 128), (80, 80), (256, 256)], ids=str)
def test_head_sizes_of_query_and_value_may_differ(sizes, dtype):
    layout, *states = _states(dtype, size=sizes[0], value_size=sizes[1])
    _compare(layout, states, Pattern(causal=True), sizes[0] ** -0.5, dtype)

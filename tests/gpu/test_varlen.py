"""torch's variable-length kernels against attention of each document alone, computed in float32."""

import pytest
import torch

from autopack.attention.choose import attend_varlen
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from tests.attention.written_out import PATTERNS, reference

DEVICE = "cuda"
ROWS = [[7, 130, 1, 62, 256], [200, 200, 56]]
# One rounding of the output in the dtype (2^-8 or 2^-11 of values of order 1 to 4), and those of P
# and dS inside.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}


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


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_equals_each_document_alone(pattern, dtype):
    layout, *states = _states(dtype)
    _compare(layout, states, pattern, 0.2, dtype)


@pytest.mark.parametrize("sizes", [(16, 12), (192, 128), (80, 80), (256, 256)], ids=str)
def test_head_sizes_of_query_and_value_may_differ(sizes, dtype):
    layout, *states = _states(dtype, size=sizes[0], value_size=sizes[1])
    _compare(layout, states, Pattern(causal=True), sizes[0] ** -0.5, dtype)

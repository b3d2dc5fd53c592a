"""torch's flash kernels, and flash-attn's signature on top of them: their arguments against torch's own signatures.

The kernels are stood in for on a CPU below torch's dispatcher; see `compat.torch_flash.aten_on_cpu`.
"""

from __future__ import annotations

import pytest
import torch

from autopack.attention.backends.varlen import attend_varlen
from autopack.inspection import torches
from compat import torch_flash
from tests.attention.written_out import LAYOUT, PATTERNS, attended, states
from tests.gpu import test_models

pytestmark = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")


@pytest.mark.parametrize("pattern", ["causal", "window", "bidirectional"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("sizes", [(16, 16), (12, 10)], ids=str)
def test_arguments_pass_torchs_own_dispatcher(sizes, sinks, pattern):
    """Through `varlen_attn` and the aten operators as they are; only what they compute on a GPU is stood in for."""
    given = states(*sizes, torch.float16)
    sink = torch.linspace(-1, 2, 4).half().requires_grad_() if sinks else None
    inputs = [*given, sink] if sinks else given
    with torch_flash.aten_on_cpu():
        found = attend_varlen(LAYOUT, *given, PATTERNS[pattern], 0.3, sink)
        gradients = torch.autograd.grad(found.float().square().sum(), inputs)
    expected = attended(*(each.float() for each in given), PATTERNS[pattern], 0.3, sink)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for f, w in zip((found, *gradients), (expected, *wanted), strict=True):
        # Roundings to 11 bits of inputs and outputs, in values of order 1 to 10.
        torch.testing.assert_close(f.float(), w.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "case", [("varlen", "eager", "gpt_oss"), ("flash", "flash_attention_2", "mistral")], ids=lambda case: case[0]
)
def test_tests_of_models_pass_on_stand_ins(monkeypatch, case):
    assert case in test_models.CASES
    monkeypatch.setattr(test_models, "DEVICE", "cpu")
    monkeypatch.setattr(test_models, "LONG", (5, 12, 1, 9))
    with torch_flash.aten_on_cpu():
        test_models.test_packed_equals_alone(*case, torch.float16)



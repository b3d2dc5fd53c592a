"""The varlen backend as far as a CPU allows: its arguments and its algebra, against kernels written
out in torch."""

import pytest
import torch

from autopack.attention import choose
from autopack.attention.call import AttentionCall
from autopack.inspection import torches
from autopack.inspection.masks import Pattern
from compat import signatures, torch_flash
from compat.standins import attend_densely
from tests.attention.written_out import LAYOUT, PATTERNS, attended, states
from tests.gpu import test_models

SIGNATURES = {
    release: signatures.signature(f"torch {release}", "varlen_attn")
    for release in signatures.TORCHES
}
CHOOSING = ("2.14.1", "2.15.0")
"""Those that take cuDNN for what has no window, as `(-1, -1)` or in 2.15 `(-1, 0)` say; a wider one
says the same."""


def _varlen_of(monkeypatch, release):
    """Put a `varlen_attn` of the signature of a torch in the place of the installed one."""
    signature = SIGNATURES[release]

    def varlen_attn(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, key = given["query"], given["key"]
        assert given["cu_seq_q"].dtype == given["cu_seq_k"].dtype == torch.int32
        assert type(given["max_q"]) is type(given["max_k"]) is int
        assert query.is_contiguous()
        assert query.shape[-1] % 8 == 0
        tells_groups = "enable_gqa" in signature.parameters
        assert given.get("enable_gqa") is (
            (query.shape[1] != key.shape[1]) if tells_groups else None
        )
        window = given["window_size"]
        assert release not in CHOOSING or -1 not in window
        wanted = (
            given[name]
            for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
        )
        return attend_densely(*wanted, given.get("scale"), False, window, 0.0)

    monkeypatch.setattr(torches, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torches, "VARLEN_TAKES", frozenset(signature.parameters))
    monkeypatch.setattr(torches, "VARLEN_MAY_BE_CUDNN", release in CHOOSING)


@pytest.mark.parametrize("release", SIGNATURES)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 12), (10, 6)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_equals_each_document_alone(monkeypatch, pattern, sizes, release):
    _varlen_of(monkeypatch, release)
    given = states(*sizes)
    scale = sizes[0] ** -0.5  # that of heads before they are padded
    for asked in (scale, None):
        found = choose.attend_varlen(LAYOUT, *given, pattern, asked)
        torch.testing.assert_close(found, attended(*given, pattern, scale), atol=1e-12, rtol=1e-10)


def test_says_why_it_cannot_serve():
    function = torch.nn.functional.scaled_dot_product_attention
    call = AttentionCall(function, "sdpa", torch.nn.Module(), *states(), None, LAYOUT)
    assert call.pattern == Pattern(causal=True)
    assert "CUDA tensors" in choose.refused_by_varlen(call)
    usable, reason = choose.varlen_here()
    assert usable or reason


is_there = pytest.mark.skipif(torches.varlen_attn is None, reason="this torch has no varlen_attn")


@is_there
@pytest.mark.parametrize(
    "case",
    [("varlen", "sdpa", "mistral"), ("flash", "flash_attention_2", "mistral")],
    ids=lambda case: case[0],
)
def test_tests_of_models_pass_on_stand_ins(monkeypatch, case):
    assert case in test_models.CASES
    monkeypatch.setattr(test_models, "DEVICE", "cpu")
    monkeypatch.setattr(test_models, "LONG", (5, 12, 1, 9))
    with torch_flash.aten_on_cpu():
        test_models.test_packed_equals_alone(*case, torch.float16)

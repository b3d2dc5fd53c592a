"""The varlen backend as far as a CPU allows: its arguments and its algebra, against kernels written out in torch."""

from __future__ import annotations

import pytest
import torch

from autopack.attention.backends import varlen
from autopack.attention.call import AttentionCall
from autopack.inspection import torches
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from compat import signatures
from compat.standins import attend_densely

LAYOUT = PackedLayout.from_lengths([[5, 1, 9], [8, 7]])


SIGNATURES = {release: signatures.signature(f"torch {release}", "varlen_attn") for release in signatures.TORCHES}
CHOOSING = ("2.14.1", "2.15.0")
"""Those that take cuDNN for what has no window, as `(-1, -1)` or in 2.15 `(-1, 0)` say; a wider one says the same."""


def _varlen_of(monkeypatch, release):
    """Put a `varlen_attn` of the signature of a torch in the place of the installed one."""
    signature = SIGNATURES[release]

    def varlen_attn(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, key = given["query"], given["key"]
        assert query.is_contiguous()
        assert query.shape[-1] % 8 == 0
        tells_groups = "enable_gqa" in signature.parameters
        assert given.get("enable_gqa") is ((query.shape[1] != key.shape[1]) if tells_groups else None)
        window = given.get("window_size", (-1, 0) if given.get("is_causal") else (-1, -1))
        assert release not in CHOOSING or -1 not in window
        states = (given[name] for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"))
        return attend_densely(*states, given.get("scale"), False, window, 0.0)

    monkeypatch.setattr(torches, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torches, "VARLEN_TAKES", frozenset(signature.parameters))
    monkeypatch.setattr(torches, "VARLEN_MAY_BE_CUDNN", release in CHOOSING)


def _states(size=16, value_size=16):
    generator = torch.Generator().manual_seed(0)

    def draw(heads, width):
        return torch.randn(2, heads, 15, width, generator=generator, dtype=torch.float64).requires_grad_()

    return draw(4, size), draw(2, size), draw(2, value_size)


def _alone(states, pattern, scale, sinks=None):
    query, key, value = states
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    out = torch.zeros(2, 15, 4, value.shape[-1], dtype=query.dtype)
    for row, first, end in LAYOUT.spans:
        index = torch.arange(end - first)
        distance = index[:, None] - index[None, :]
        visible = (distance >= 0) if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
        if pattern.before is not None:
            visible = visible & (distance <= pattern.before)
        if pattern.after is not None:
            visible = visible & (-distance <= pattern.after)
        if pattern.chunk is not None:
            visible = visible & (index[:, None] // pattern.chunk == index[None, :] // pattern.chunk)
        q, k, v = (t[row, :, first:end] for t in (query, key, value))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - first, 1)], dim=-1)
        out[row, first:end] = (scores.softmax(-1)[..., : end - first] @ v).transpose(0, 1)
    return out


PATTERNS = {
    "causal": Pattern(causal=True),
    "bidirectional": Pattern(causal=False),
    "window": Pattern(causal=True, before=3),
    "two-sided window": Pattern(causal=False, before=2, after=2),
    "chunks": Pattern(causal=True, chunk=4),
}


@pytest.mark.parametrize("release", SIGNATURES)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 12), (10, 6)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_equals_each_document_alone(monkeypatch, pattern, sizes, release):
    _varlen_of(monkeypatch, release)
    states = _states(*sizes)
    if pattern.is_windowed and release == "2.10.0":
        call = AttentionCall(None, "sdpa", torch.nn.Module(), *(t.half() for t in states), None, LAYOUT)
        monkeypatch.setattr(AttentionCall, "pattern", pattern)
        monkeypatch.setattr(varlen, "refused_device", lambda device: None)
        assert "no windows" in varlen.refusal(call)
        return
    found = varlen.attend_varlen(LAYOUT, *states, pattern, 0.3)
    torch.testing.assert_close(found, _alone(states, pattern, 0.3), atol=1e-12, rtol=1e-10)


def _flash_forward(query, key, value, bounds, _k, longest, _m, dropout, causal, debug, *, scale, window_size_left,
                   window_size_right):  # fmt: skip
    """`aten._flash_attention_forward` for variable lengths: output, log-sum-exp (heads, tokens), and its rng state."""
    assert dropout == 0.0
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    scores, value = _scores(query, key, value, bounds, scale, (window_size_left, window_size_right))
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return output, scores.logsumexp(-1), torch.tensor(0), torch.tensor(0), None


def _flash_backward(grad, query, key, value, output, lse, bounds, _k, longest, _m, dropout, causal, state, unused, *,
                    scale, window_size_left, window_size_right):  # fmt: skip
    """`aten._flash_attention_backward`: recomputes P = exp(S - lse) from the log-sum-exp that it is given."""
    scores, spread = _scores(query, key, value, bounds, scale, (window_size_left, window_size_right))
    groups = query.shape[1] // key.shape[1]
    weights = torch.exp(scores - lse.unsqueeze(-1))
    d_value = torch.einsum("hqk,qhd->khd", weights, grad)
    d_weights = torch.einsum("qhd,khd->hqk", grad, spread)
    d_scores = weights * (d_weights - (grad * output).sum(-1).transpose(0, 1).unsqueeze(-1)) * scale
    wide = key.repeat_interleave(groups, dim=1)
    d_query = torch.einsum("hqk,khd->qhd", d_scores, wide)
    d_key = torch.einsum("hqk,qhd->khd", d_scores, query)
    d_key, d_value = (t.unflatten(1, (-1, groups)).sum(2) for t in (d_key, d_value))
    return d_query, d_key, d_value


def _scores(query, key, value, bounds, scale, window):
    from compat.standins import scores_within

    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    return scores_within(query, key, bounds, bounds, scale, False, window), value


@pytest.mark.parametrize("pattern", [PATTERNS["causal"], PATTERNS["window"]], ids=["causal", "window"])
def test_sinks_are_exact_in_output_and_gradients(monkeypatch, pattern):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _flash_backward)
    states = _states()
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
    found = varlen.attend_varlen(LAYOUT, *states, pattern, 0.3, sinks)
    expected = _alone(states, pattern, 0.3, sinks)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)  # the log-sum-exp is float32 by contract
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    inputs = [*states, sinks]
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for f, w in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(f, w, atol=1e-5, rtol=1e-5)


def test_says_why_it_cannot_serve():
    function = torch.nn.functional.scaled_dot_product_attention
    call = AttentionCall(function, "sdpa", torch.nn.Module(), *_states(), None, LAYOUT)
    assert call.pattern == Pattern(causal=True)
    assert "CUDA tensors" in varlen.refusal(call)
    usable, reason = varlen.availability()
    assert usable or reason

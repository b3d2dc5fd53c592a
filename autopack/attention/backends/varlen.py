"""Variable-length attention by the FlashAttention kernels that torch itself carries (CUDA, torch
2.10 and later).

No flash-attn package is needed. Windows, scale and grouped-query heads go to the kernel. Attention
sinks are folded in through the log-sum-exp, and the backward kernel gets the output and log-sum-exp
that include the sink, which makes the gradients exact (P = exp(S - lse) is what the kernel
recomputes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopack.attention.call import AttentionCall, Backend, Output
from autopack.attention.prefixes import with_keys_of_documents
from autopack.inspection import torches
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from autopack.layout.prefixes import Prefixes

_MAX_HEAD_SIZE = 256
_TOO_OLD = "needs compute capability 8.0 (Ampere) or later"


def availability() -> tuple[bool, str]:
    """Return True if the backend can be used here, and the reason if not."""
    missing = torches.without_varlen()
    if missing is not None:
        return False, missing
    if not torch.cuda.is_available():
        return False, "needs a CUDA device"
    if torch.cuda.get_device_capability()[0] < 8:
        return False, _TOO_OLD
    return True, "torch.nn.attention.varlen"


def refused_device(device: torch.device) -> str | None:
    """Return why the kernel does not run on a device, or None."""
    if device.type != "cuda":
        return "the kernel needs CUDA tensors"
    return _TOO_OLD if torch.cuda.get_device_capability(device.index)[0] < 8 else None


def refusal(call: AttentionCall) -> str | None:
    """Return why this attention cannot go to the kernel, or None."""
    query, value, options = call.query, call.value, call.options
    if (reason := refused_device(query.device)) is not None:
        return reason
    dtypes = {torches.taken_by_sdpa(states) for states in (query, call.key, value)}
    if not dtypes <= {torch.float16, torch.bfloat16} or len(dtypes) > 1:
        return f"the kernel takes float16 or bfloat16, not {' and '.join(sorted(map(str, dtypes)))}"
    if max(query.shape[-1], value.shape[-1]) > _MAX_HEAD_SIZE:
        return f"the kernel takes heads of up to {_MAX_HEAD_SIZE}, not {query.shape[-1]}"
    if call.pattern is None:
        return "the mask is neither causal, bidirectional, windowed nor chunked"
    if call.pattern.is_windowed and options.get("s_aux") is None and torches.without_windows():
        return torches.without_windows()
    for name in ("softcap", "position_bias"):
        if options.get(name) is not None:
            return f"the kernel has no {name}"
    if options.get("dropout"):
        return "the kernel has no attention dropout"
    return None


def attend(call: AttentionCall) -> Output:
    """Attend within each document; there are no attention weights."""
    pattern, scale, sinks = call.pattern, call.options.get("scaling"), call.options.get("s_aux")
    assert pattern is not None
    return attend_varlen(call.layout, *call.states_for_sdpa(), pattern, scale, sinks), None


def over_prefixes(call: AttentionCall, prefixes: Prefixes) -> Tensor | None:
    """Attend from each stretch to its document's keys: the kernel aligns queries with the last
    keys."""
    pattern = call.pattern
    if pattern is None or pattern.chunk is not None or call.options.get("s_aux") is not None:
        return None
    call = with_keys_of_documents(call, prefixes)
    states, scale = call.states_for_sdpa(), call.options.get("scaling")
    return attend_varlen(prefixes.queries, *states, pattern, scale, memory=prefixes.keys)


def attend_varlen(
    layout: PackedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    scale: float | None,
    sinks: Tensor | None = None,
    memory: PackedLayout | None = None,
) -> Tensor:
    """Attend within each document of states (R, H, C, E) in float16 or bfloat16; returns (R, C, H,
    V).

    Keys and values belong to `memory`, if given. `sinks` are one logit per query head, which takes
    part in each softmax without a value.
    """
    if pattern.chunk is not None:
        layout = layout.in_chunks(pattern.chunk)
    rows, heads, columns, size = query.shape
    # The kernel wants one head size for all three, and a multiple of 8.
    padded = -(-max(size, value.shape[-1]) // 8) * 8
    flat = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    q, k, v = (F.pad(t, (0, padded - t.shape[-1])) if t.shape[-1] < padded else t for t in flat)
    before, after = (-1 if each is None else each for each in (pattern.before, 0 if pattern.causal else pattern.after))
    longest = columns if torch.compiler.is_compiling() else layout.max_seqlen
    settings = (layout.kernel_cu_seqlens, longest, size**-0.5 if scale is None else scale, (before, after))
    if memory is not None:
        output = torches.attend_varlen(q, k, v, *settings, keys=(memory.kernel_cu_seqlens, memory.max_seqlen))
    elif sinks is None:
        output = torches.attend_varlen(q, k, v, *settings)
    else:
        output = _SinkAttention.apply(q, k, v, sinks, *settings)
    return output[..., : value.shape[-1]].reshape(rows, columns, heads, value.shape[-1])


class _SinkAttention(torch.autograd.Function):
    """Attention of states (tokens, H, E) with a sink per head; settings as for
    `torches.attend_varlen`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, cu_seqlens: Tensor, *settings: Any
    ) -> Tensor:
        longest, scale, window = settings
        # What torch's two kernels have in common, by position and by name; there is no dropout.
        common = longest, longest, 0.0, window == (-1, 0)
        named = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        output, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_seqlens, cu_seqlens, *common, False, **named
        )
        logits = sinks.float().unsqueeze(1)  # lse is (H, tokens)
        with_sink = torch.logaddexp(lse, logits)
        output = output * torch.exp(lse - with_sink).transpose(0, 1).unsqueeze(-1).to(output.dtype)
        ctx.save_for_backward(query, key, value, output, with_sink, logits, cu_seqlens, state, unused)
        ctx.settings = common, named, sinks.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, logits, cu_seqlens, state, unused = ctx.saved_tensors
        common, named, dtype = ctx.settings
        grad = grads[0].contiguous()
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, output, lse, cu_seqlens, cu_seqlens, *common, state, unused, **named
        )
        share = torch.exp(logits - lse)
        d_sinks = -(share * (grad.float() * output.float()).sum(-1).transpose(0, 1)).sum(1)
        return d_query, d_key, d_value, d_sinks.to(dtype), None, None, None, None


BACKEND = Backend(
    name="varlen",
    attend=attend,
    over_prefixes=over_prefixes,
    availability=availability,
    refusal=refusal,
    stands_in={"sdpa": None, "eager": "flash_attention"},
    goes_first=frozenset({"sdpa"}),
    devices=frozenset({"cuda"}),
    strict=True,
)

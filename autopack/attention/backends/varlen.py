"""Variable-length attention by the FlashAttention kernels that torch itself carries (CUDA, torch
2.11 and later).

No flash-attn package is needed. Windows, scale and grouped-query heads go to the kernel.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from autopack.attention.call import AttentionCall, Backend, Output
from autopack.attention.prefixes import by_kernel
from autopack.inspection import torches
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout

_MAX_HEAD_SIZE = 256
_TOO_OLD = "needs compute capability 8.0 (Ampere) or later"


def availability() -> tuple[bool, str]:
    """Return (True if torch's kernel can be used here, its module or the reason why not)."""
    missing = torches.without_varlen()
    if missing is not None:
        return False, missing
    if not torch.cuda.is_available():
        return False, "needs a CUDA device"
    if torch.cuda.get_device_capability()[0] < 8:
        return False, _TOO_OLD
    return True, "torch.nn.attention.varlen"


def refused_device(device: torch.device) -> str | None:
    """Return the reason why the kernel does not run on a device, or None."""
    if device.type != "cuda":
        return "the kernel needs CUDA tensors"
    return _TOO_OLD if torch.cuda.get_device_capability(device.index)[0] < 8 else None


def refusal(call: AttentionCall) -> str | None:
    """Return the reason why the kernel cannot serve an attention call, or None."""
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
    for name, what in (
        ("softcap", "softcap"),
        ("position_bias", "position_bias"),
        ("s_aux", "attention sinks"),
    ):
        if options.get(name) is not None:
            return f"the kernel has no {what}"
    if options.get("dropout"):
        return "the kernel has no attention dropout"
    return None


def attend(call: AttentionCall) -> Output:
    """Attend within each document by torch's kernel; return (output, None), without weights."""
    assert call.pattern is not None
    states, scale = call.states_for_sdpa(), call.options.get("scaling")
    return attend_varlen(call.layout, *states, call.pattern, scale, call.memory), None


def attend_varlen(
    layout: PackedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    scale: float | None,
    memory: PackedLayout | None = None,
) -> Tensor:
    """Attend within each document of half-precision states (R, H, C, E); return (R, C, H, V).

    Keys and values belong to `memory`, if given.
    """
    if pattern.chunk is not None:
        layout = layout.in_chunks(pattern.chunk)
    rows, heads, columns, size = query.shape
    # The kernel wants one head size for all three, and a multiple of 8.
    padded = -(-max(size, value.shape[-1]) // 8) * 8
    flat = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    q, k, v = (F.pad(t, (0, padded - t.shape[-1])) if t.shape[-1] < padded else t for t in flat)
    before, after = (
        -1 if each is None else each
        for each in (pattern.before, 0 if pattern.causal else pattern.after)
    )
    longest = columns if torch.compiler.is_compiling() else layout.max_seqlen
    keys = None if memory is None else (memory.kernel_cu_seqlens, memory.max_seqlen)
    scale = size**-0.5 if scale is None else scale
    output = torches.attend_varlen(
        q,
        k,
        v,
        layout.kernel_cu_seqlens,
        longest,
        scale,
        (before, after),
        keys=keys,
    )
    return output[..., : value.shape[-1]].reshape(rows, columns, heads, value.shape[-1])


BACKEND = Backend(
    name="varlen",
    attend=attend,
    over_prefixes=partial(by_kernel, attend),
    availability=availability,
    refusal=refusal,
    stands_in=frozenset({"sdpa"}),
    devices=frozenset({"cuda"}),
)

"""The installed torch: its release is queried here only.

Sections are ordered by the release that brought the thing, oldest first, so that dropping a release
is deleting a section, or its words on earlier releases. Nothing compares versions: torch itself is
asked.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def is_recorded() -> bool:
    """Return True in a trace, a compilation, a CUDA graph's capture or torch.func."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


# --- 2.5: Dynamo reads `strict` of zip; before, it takes it for true whatever it says. `by_name`
# can go with torch 2.4.


def by_name(names: Sequence[str], args: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments by name, as far as there are names; Dynamo may trace this."""
    return dict(zip(names[: len(args)], args[: len(names)], strict=True))


# --- 2.5: torch.nn.attention.flex_attention. All of it can go with torch 2.4.


def without_flex_attention() -> str | None:
    """Return the reason, in one clause, why there is no FlexAttention, or None.

    transformers registers a function for it even without torch's.
    """
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is not None:
        return None
    return f"torch {torch.__version__} has no torch.nn.attention.flex_attention; it came with 2.5"


def is_block_mask(mask: Any) -> bool:
    """Return True if a mask is FlexAttention's BlockMask; imports nothing."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(mask, flex.BlockMask)


# --- 2.7: torch._dynamo.disable takes a reason. The question can go with torch 2.6.


def untraced(reason: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that breaks graphs at a function, with a reason for Dynamo's errors."""
    takes_reason = "reason" in inspect.signature(torch._dynamo.disable).parameters
    return partial(torch._dynamo.disable, reason=reason) if takes_reason else torch._dynamo.disable


def only_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, marked: Dynamo traces it as a part of a graph, but begins no graph at it.

    `torch.compile(model)` runs the hooks of a model outside of its graph, and would make each of
    them one of its own.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


# --- What autocast does to attention, in every release.


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of the autocast in force for a kind of device; None if there is none."""
    # The meta device has no autocast, and may not be asked. Not `torch.amp.is_autocast_available`,
    # at which graphs of torch before 2.11 break.
    in_force = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if in_force else None


def taken_by_sdpa(states: Tensor) -> torch.dtype:
    """Return the dtype to which `scaled_dot_product_attention` casts states under autocast.

    Rotary embeddings leave queries and keys in float32 where values come in half precision out of a
    linear layer: torch's own function casts all three, and whatever stands in for it has to do the
    same.
    """
    lowered = None if states.dtype == torch.float64 else autocast_dtype(states.device.type)
    return lowered or states.dtype


# --- 2.11: torch.nn.attention.varlen takes a scale and a window. The question can go with torch
# 2.10. 2.12: it wants to be told of grouped heads, which its kernels have always taken.

try:
    from torch.nn.attention import varlen as _varlen
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = _varlen = None  # type: ignore[assignment]

VARLEN_TAKES = frozenset(() if varlen_attn is None else inspect.signature(varlen_attn).parameters)
"""The parameters of `varlen_attn`, read once: layers call it in every forward."""

VARLEN_MAY_BE_CUDNN = hasattr(_varlen, "_can_use_cudnn") or hasattr(_varlen, "_select_backend")
"""True if `varlen_attn` chooses between FlashAttention and cuDNN (2.14 and later)."""

_BEYOND = 1 << 30
"""A window wider than any document: the same as none."""


def without_varlen() -> str | None:
    """Return the reason, in one clause, why torch has no `varlen_attn` with windows, or None."""
    if "window_size" in VARLEN_TAKES:
        return None
    return (
        f"torch {torch.__version__} has no torch.nn.attention.varlen with windows; it came with "
        "2.11"
    )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: tuple[int, int],
    keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return `varlen_attn` of (tokens, heads, head size) states, under any release's signature.

    `keys` are the cumulative lengths of the keys and the longest of them, if they differ from the
    queries'.
    """
    # cuDNN, which takes no windows, plans anew for every number of documents and every longest one.
    unlimited = _BEYOND if VARLEN_MAY_BE_CUDNN else -1
    reaches = tuple(unlimited if reach == -1 else reach for reach in window)
    arguments: dict[str, Any] = {"scale": scale, "window_size": reaches}
    if "enable_gqa" in VARLEN_TAKES:
        arguments["enable_gqa"] = query.shape[1] != key.shape[1]
    states = query, key, value
    keys = (cu_seqlens, longest) if keys is None else keys
    return varlen_attn(  # type: ignore[return-value]
        *states, cu_seqlens, keys[0], longest, keys[1], **arguments
    )

"""The backends of attention, and the choice among them.

These compute attention within all documents in one call of a kernel:

* `flash`: FlashAttention 2, 3 and 4, the user's own implementation, given the bounds of documents
  as arguments.
* `varlen`: the FlashAttention kernels that torch itself carries (CUDA, torch 2.11 and later).
  No flash-attn package is needed. Windows, scale and grouped-query heads go to the kernel.
* `flex`: FlexAttention, with one BlockMask per kind of layer and forward, made by transformers' own
  functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopack.attention.call import EAGER, SDPA, AttentionCall, Backend, Output
from autopack.attention.document_mask import DocumentMask
from autopack.inspection import masks, releases, torches
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from autopack.layout.prefixes import Prefixes
from autopack.layout.ways import FLASH_KWARGS

_MAX_HEAD_SIZE = 256
_TOO_OLD = "needs compute capability 8.0 (Ampere) or later"


def _by_kernel(
    attend: Callable[[AttentionCall], Output], call: AttentionCall, prefixes: Prefixes
) -> Tensor | None:
    """Return attention of stretches to their documents so far; None for chunks or unknown rules.

    Keys and values of each stretch are laid end to end. Kernels align queries with the last keys.
    """
    if call.pattern is None or call.pattern.chunk is not None:
        return None
    columns = prefixes.key_columns.to(call.key.device)
    key, value = (states.index_select(2, columns) for states in (call.key, call.value))
    call = replace(call, key=key, value=value, layout=prefixes.queries, memory=prefixes.keys)
    return attend(call)[0]


def _flash_here() -> tuple[bool, str]:
    """Return (True if flash attention can be used here, its implementations or the reason)."""
    if found := flash_implementations():
        return True, ", ".join(found)
    return (
        False,
        "no CUDA device, or no flash-attn that transformers accepts (pip install flash-attn)",
    )


def flash_implementations() -> tuple[str, ...]:
    """Return the flash implementations whose package and device transformers finds here."""
    from transformers import utils

    return tuple(
        f"flash_attention_{version}"
        for version in (2, 3, 4)
        if getattr(utils, f"is_flash_attn_{version}_available", bool)()
    )


def _attend_by_flash(call: AttentionCall) -> Output:
    """Return (output, None) of transformers' flash function, given the bounds of all documents.

    The function takes windows, softcap and scale from its own arguments, as it does for a document
    alone. Chunked attention becomes documents of one chunk each. Flash attention ignores a rule
    over per-token blocks, also for a document alone. Raises `UnsupportedModel` for a mask that the
    model made itself.
    """
    call.refuse_dense_mask("flash attention")
    layouts = [call.layout, call.keys]
    pattern = call.mask.pattern if isinstance(call.mask, DocumentMask) else None
    if pattern is not None and pattern.chunk is not None:
        layouts = [layout.in_chunks(pattern.chunk) for layout in layouts]
    # A length per layout must not reach a compiled graph; the row length is an upper bound.
    longest = [
        each.shape[1] if torch.compiler.is_compiling() else each.max_seqlen for each in layouts
    ]
    declared = (*(each.kernel_cu_seqlens for each in layouts), *longest)
    given = {**call.options_with(None), **dict(zip(FLASH_KWARGS, declared, strict=True))}
    given.pop("position_ids", None)
    if releases.flash_wants_positions():
        given["position_ids"] = layouts[0].extent  # all that is asked is whether there are any
    return call.original(call.module, *call.states, None, **given)


# It serves only models that use it, so what it cannot do is not done for a document alone either:
# it refuses nothing.
FLASH = Backend(
    attend=_attend_by_flash,
    over_prefixes=partial(_by_kernel, _attend_by_flash),
    availability=_flash_here,
)


def varlen_here() -> tuple[bool, str]:
    """Return (True if torch's kernel can be used here, its module or the reason why not)."""
    missing = torches.without_varlen()
    if missing is None and not torch.cuda.is_available():
        missing = "needs a CUDA device"
    missing = missing or refused_device(torch.device("cuda"))
    return missing is None, missing or "torch.nn.attention.varlen"


def refused_device(device: torch.device) -> str | None:
    """Return the reason why torch's packed kernel does not run on a device, or None."""
    if device.type != "cuda":
        return "the kernel needs CUDA tensors"
    return _TOO_OLD if torch.cuda.get_device_capability(device.index)[0] < 8 else None


def refused_by_varlen(call: AttentionCall) -> str | None:
    """Return the reason why torch's packed kernel cannot serve an attention call, or None."""
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


def _attend_by_varlen(call: AttentionCall) -> Output:
    """Return (output, None) of torch's packed kernel; the call must have a `pattern`."""
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
    """Return (R, C, H, V), torch's kernel on half-precision states (R, H, C, E), by documents.

    Keys and values belong to `memory`, if given.
    """
    if pattern.chunk is not None:
        layout = layout.in_chunks(pattern.chunk)
    rows, heads, columns, size = query.shape
    # The kernel wants one head size for all three, and a multiple of 8.
    padded = -(-max(size, value.shape[-1]) // 8) * 8
    flat = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    q, k, v = (F.pad(t, (0, padded - t.shape[-1])) if t.shape[-1] < padded else t for t in flat)
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
        pattern.reach(-1),
        keys=keys,
    )
    return output[..., : value.shape[-1]].reshape(rows, columns, heads, value.shape[-1])


VARLEN = Backend(
    attend=_attend_by_varlen,
    over_prefixes=partial(_by_kernel, _attend_by_varlen),
    availability=varlen_here,
    refusal=refused_by_varlen,
    stands_in=frozenset({"sdpa"}),
    devices=frozenset({"cuda"}),
)


def _flex_here() -> tuple[bool, str]:
    """Return (True if FlexAttention can be used here, its module or the reason why not)."""
    missing = torches.without_flex_attention()
    if missing is not None:
        return False, missing
    if not masks.has_mask_interface():
        return False, f"transformers {releases.VERSION} has no mask interface; it came with 4.53"
    if releases.attention_function("flex_attention") is None:
        return False, "transformers has registered no flex_attention"
    if not torch.cuda.is_available():
        return False, "torch has no backward of flex_attention off CUDA"
    return True, "torch.nn.attention.flex_attention"


def _attend_by_flex(call: AttentionCall) -> Output:
    """Return (output, weights or None) of transformers' flex function, by documents; or raise."""
    if isinstance(call.mask, DocumentMask):
        blocks = call.mask.over_rows
    else:
        if not torches.is_block_mask(call.mask):
            call.refuse_dense_mask("flex_attention")
        rule = getattr(call.mask, "mask_mod", masks.CAUSAL if call.is_causal else None)
        blocks = _blocks_within_documents(call.layout, call.keys, rule)
    return call.original(call.module, *call.states, blocks, **call.options)


def _blocks_within_documents(
    layout: PackedLayout, memory: PackedLayout, own: Callable[..., Any] | None
) -> Any:
    """Return a BlockMask (rows, 1, columns of `layout`, columns of `memory`) within documents.

    `own` is a rule over columns of the rows that has to hold as well, or None.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    ours, theirs = layout.seq_idx, memory.seq_idx

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        same = ours[b, q] == theirs[b, k]
        return same if own is None else same & own(b, h, q, k)

    def make() -> tuple[Any, Any]:
        """Create the mask; return it with `own`, whose id is the key and which must stay alive."""
        size = layout.rows, None, layout.columns, memory.columns
        return create_block_mask(rule, *size, device=str(layout.device)), own

    return layout.derived(("blocks", memory, id(own)), make)[0]


FLEX = Backend(
    attend=_attend_by_flex,
    availability=_flex_here,
)

# --- The choice

BACKENDS = {"eager": EAGER, "flash": FLASH, "flex": FLEX, "sdpa": SDPA, "varlen": VARLEN}
"""Backends that the user can ask for by name."""


def availability() -> dict[str, tuple[bool, str]]:
    """Return {backend: (True if this machine can use it, by which module or the reason)}."""
    return {name: backend.availability() for name, backend in BACKENDS.items()}


def candidates(implementation: str) -> tuple[str, ...]:
    """Return the backends that could serve an implementation, installed or not; its own is last."""
    first = [name for name, backend in BACKENDS.items() if implementation in backend.stands_in]
    return *first, own_backend(implementation)


def taken_by_auto(implementation: str, device: str) -> tuple[str, ...]:
    """Return the backends that `"auto"` may take on a device kind: usable here, its own last."""
    *first, own = candidates(implementation)
    there = [name for name in first if device in (BACKENDS[name].devices or (device,))]
    return *(name for name in there if BACKENDS[name].availability()[0]), own


def own_backend(implementation: str) -> str:
    """Return the name of an implementation's own backend; "eager" for unknown implementations."""
    if releases.is_flash(implementation):
        return "flash"
    return {"sdpa": "sdpa", "flex_attention": "flex"}.get(implementation, "eager")

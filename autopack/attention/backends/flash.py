"""FlashAttention 2, 3 and 4: the user's own implementation, given the bounds of documents as
arguments."""

from __future__ import annotations

from functools import partial

import torch

from autopack.attention.call import AttentionCall, Backend, Output
from autopack.attention.document_mask import DocumentMask
from autopack.attention.prefixes import by_kernel
from autopack.inspection import releases
from autopack.layout.ways import FLASH_KWARGS


def availability() -> tuple[bool, str]:
    """Return (True if flash attention can be used here, its implementations or the reason)."""
    if found := implementations():
        return True, ", ".join(found)
    return (
        False,
        "no CUDA device, or no flash-attn that transformers accepts (pip install flash-attn)",
    )


def implementations() -> tuple[str, ...]:
    """Return the flash implementations whose package and device transformers finds here."""
    from transformers import utils

    checks = {
        version: getattr(utils, f"is_flash_attn_{version}_available", None) for version in (2, 3, 4)
    }
    return tuple(
        f"flash_attention_{version}"
        for version, check in checks.items()
        if check is not None and check()
    )


def attend(call: AttentionCall) -> Output:
    """Attend by transformers' flash function with cumulative lengths over all flattened rows.

    The function takes windows, softcap and scale from its own arguments, as it does for a document
    alone. Chunked attention becomes documents of one chunk each. Flash attention ignores a rule
    over per-token blocks, also for a document alone.
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
    given = {**call.options_beside(None), **dict(zip(FLASH_KWARGS, declared, strict=True))}
    given.pop("position_ids", None)
    if releases.flash_wants_positions():
        given["position_ids"] = layouts[0].derived("places", layouts[0].position_ids)
    return call.original(call.module, *call.states, None, **given)


# It serves only models that use it, so what it cannot do is not done for a document alone either:
# it refuses nothing.
BACKEND = Backend(
    name="flash",
    attend=attend,
    over_prefixes=partial(by_kernel, attend),
    availability=availability,
)

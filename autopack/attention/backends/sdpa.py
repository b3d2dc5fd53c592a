"""SDPA, document by document: by transformers' own function, or in compiled graphs by one
operator."""

from __future__ import annotations

import torch

from autopack.attention import per_document, prefixes
from autopack.attention.call import AttentionCall, Backend, Output
from autopack.attention.compiled import attend_compiled


def attend(call: AttentionCall) -> Output:
    """Attend within each document, per document or in compiled code by one operator."""
    pattern, options = call.pattern if torch.compiler.is_compiling() else None, call.options
    given = options.get("dropout") or options.get("position_bias") is not None
    if pattern is None or pattern.chunk is not None or call.replaces_sdpa or given:
        return per_document.attend(call)
    scaling = options.get("scaling")
    return attend_compiled(
        call.layout.slots_on_host, *call.states_for_sdpa(), pattern, scaling
    ), None


BACKEND = Backend(
    name="sdpa",
    attend=attend,
    over_prefixes=prefixes.by_stretches,
    availability=lambda: (True, "torch.nn.functional.scaled_dot_product_attention"),
)

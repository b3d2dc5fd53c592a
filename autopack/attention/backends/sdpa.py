"""SDPA, document by document: by transformers' own function, or in compiled graphs by one
operator."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopack.attention import per_document, prefixes
from autopack.attention.call import AttentionCall, Backend, Output, unpatched
from autopack.attention.compiled import attend_compiled
from autopack.attention.document_mask import DocumentMask
from autopack.inspection import masks, releases


def attend(call: AttentionCall) -> Output:
    """Attend within each document."""
    pattern, options = call.pattern if torch.compiler.is_compiling() else None, call.options
    if pattern is None or call.replaces_sdpa or options.get("dropout") or options.get("position_bias") is not None:
        return _attend_by_function(call)
    states = call.states_for_sdpa()
    return attend_compiled(call.layout.slots_on_host, *states, pattern, options.get("scaling")), None


@torch._dynamo.disable
def _attend_by_function(call: AttentionCall) -> Output:
    """Attend within each document by torch's `scaled_dot_product_attention`."""
    return per_document.attend(_by_sdpa(call))


def _by_sdpa(call: AttentionCall) -> AttentionCall:
    """Return the call with transformers' SDPA function in place of the model's implementation."""
    if call.implementation == "sdpa":
        return call
    mask = call.mask
    if isinstance(mask, DocumentMask):
        mask = mask.made_by(unpatched(masks.mask_function("sdpa")))
    return replace(call, original=unpatched(releases.attention_function("sdpa")), mask=mask)


BACKEND = Backend(
    name="sdpa",
    attend=attend,
    over_prefixes=lambda call, shared: prefixes.by_stretches(_by_sdpa(call), shared),
    availability=lambda: (True, "torch.nn.functional.scaled_dot_product_attention"),
    implementations=lambda: ("sdpa",),
    is_own=lambda implementation: implementation == "sdpa",
    stands_in={"eager": "sdpa"},
)

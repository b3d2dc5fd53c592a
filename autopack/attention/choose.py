"""Which backend computes a layer's attention: what may serve a model at all, and the choice at call time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from autopack.attention.backends import flash, flex, per_document, sdpa, varlen
from autopack.attention.call import AttentionCall, Output
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, releases, torches


class Backend(NamedTuple):
    """What a backend does: the functions of its module.

    `attend` attends within each document. It returns the output (rows, columns, heads, value head size), and the
    attention weights (rows, heads, columns, columns), zero across documents, where they are wanted and the backend can
    give them. `availability` says whether the backend can be used on this machine, and by what or why not; `refusal`
    why it cannot serve a call, or None where it can.
    """

    attend: Callable[[AttentionCall], Output]
    availability: Callable[[], tuple[bool, str]]
    # FlashAttention serves only models that use it, so what it cannot do is not done for a document alone either.
    refusal: Callable[[AttentionCall], str | None] = lambda call: None


BACKENDS = {
    "flash": Backend(flash.attend, flash.availability),
    "varlen": Backend(varlen.attend, varlen.availability, varlen.refusal),
    "flex": Backend(flex.attend, flex.availability, flex.refusal),
    "sdpa": Backend(sdpa.attend, lambda: (True, "torch.nn.functional.scaled_dot_product_attention")),
    "eager": Backend(per_document.attend, lambda: (True, "the model's own attention function")),
}
"""What a user can ask for by name."""


def availability() -> dict[str, tuple[bool, str]]:
    """For each backend, whether it can be used on this machine, and by what or why not."""
    return {name: backend.availability() for name, backend in BACKENDS.items()}


def candidates(implementation: str, model: PreTrainedModel) -> tuple[str, ...]:
    """Backends that may serve a model loaded with an attention implementation, the preferred one first.

    A backend other than the implementation's own is a candidate only where the model's class declares support of it,
    because only then do both compute the same attention.
    """
    declared = releases.supported_implementations(model)
    if implementation == "sdpa":
        return ("varlen", "sdpa", "flex") if "flex_attention" in declared else ("varlen", "sdpa")
    others = (
        {"varlen": "flash_attention", "flex": "flex_attention", "sdpa": "sdpa"} if implementation == "eager" else {}
    )
    return _own_backend(implementation), *(backend for backend, needed in others.items() if needed in declared)


def choose(requested: str, call: AttentionCall) -> str:
    """The backend for one attention call: the requested one, or the best that serves it. Raises `UnsupportedModel`."""
    own = _own_backend(call.implementation)
    # The model's own eager attention reads no `is_causal`, flash attention no mask, and flex makes one in any case.
    if requested == "sdpa" or (own in ("sdpa", "eager") and call.implementation != "eager"):
        call.refuse_two_directions(requested)
    if requested != "auto":
        reason = BACKENDS[requested].refusal(call)
        if reason is not None:
            raise UnsupportedModel(
                f"backend={requested!r} was asked for, but {type(call.module).__name__} cannot use it: {reason}. Use "
                f"backend='auto'."
            )
        return requested
    if own == "sdpa" and not call.replaces_sdpa and varlen.refusal(call) is None and varlen.availability()[0]:
        return "varlen"
    dense = isinstance(call.mask, torch.Tensor) or not masks.has_mask_interface()
    if own == "flex" and dense and not torches.is_block_mask(call.mask):
        return "eager"  # a mask of the model's own is cut by documents, and no BlockMask is made of it
    return own


def _own_backend(implementation: str) -> str:
    if releases.is_flash(implementation):
        return "flash"
    return {"flex_attention": "flex", "sdpa": "sdpa"}.get(implementation, "eager")

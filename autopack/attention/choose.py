"""Which backend computes a layer's attention: what may serve a model at all, and the choice at call time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from autopack.attention.backends import flex, varlen
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, releases

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["availability", "candidates", "choose", "pattern_of"]


def availability() -> dict[str, tuple[bool, str]]:
    """For each backend, whether it can be used on this machine, and by what or why not."""
    return {
        "flash": _flash_availability(),
        "varlen": varlen.availability(),
        "flex": flex.availability(),
        "sdpa": (True, "torch.nn.functional.scaled_dot_product_attention"),
        "eager": (True, "the model's own attention function"),
    }


def _flash_availability() -> tuple[bool, str]:
    from transformers import utils

    found = []
    for version in (2, 3, 4):
        check = getattr(utils, f"is_flash_attn_{version}_available", None)
        if check is not None and check():
            found.append(f"flash_attention_{version}")
    if found:
        return True, ", ".join(found)
    return False, "no flash-attn package that transformers accepts (pip install flash-attn), or no CUDA device"


def candidates(implementation: str, model: PreTrainedModel) -> tuple[str, ...]:
    """Backends that may serve a model loaded with an attention implementation, the preferred one first.

    A backend other than the implementation's own is a candidate only where the model's class declares support of it,
    because only then do both compute the same attention.
    """
    declared = releases.supported_implementations(model)
    if releases.is_flash(implementation):
        return ("flash",)
    if implementation == "flex_attention":
        return ("flex",)
    if implementation == "sdpa":
        return ("varlen", "sdpa", "flex") if "flex_attention" in declared else ("varlen", "sdpa")
    if implementation == "eager":
        others = (("varlen", "flash_attention"), ("flex", "flex_attention"), ("sdpa", "sdpa"))
        return ("eager", *(backend for backend, needed in others if needed in declared))
    return ("eager",)


def choose(
    requested: str,
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask | torch.Tensor | None,
    options: Mapping[str, Any],
) -> str:
    """The backend for one attention call: the requested one, or the best that serves it. Raises `UnsupportedModel`."""
    if requested != "auto":
        reason = _refusal(requested, implementation, module, query, value, mask, options)
        if reason is not None:
            raise UnsupportedModel(
                f"backend={requested!r} was asked for, but {type(module).__name__} cannot use it: {reason}. Use "
                f"backend='auto'."
            )
        return requested
    if releases.is_flash(implementation):
        return "flash"
    if implementation == "flex_attention":
        return "flex"
    if implementation == "sdpa":
        fast = query.is_cuda and varlen.availability()[0]
        return (
            "varlen"
            if fast and _refusal("varlen", implementation, module, query, value, mask, options) is None
            else "sdpa"
        )
    return "eager"


def _refusal(
    backend: str,
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    value: torch.Tensor,
    mask: DocumentMask | torch.Tensor | None,
    options: Mapping[str, Any],
) -> str | None:
    if backend == "varlen":
        return varlen.refusal(query, value, pattern_of(module, mask, options), dict(options))
    if backend == "flex" and implementation != "flex_attention":  # there transformers' own checks decide
        return flex.refusal(query, mask, options)
    return None


def pattern_of(
    module: torch.nn.Module, mask: DocumentMask | torch.Tensor | None, options: Mapping[str, Any]
) -> masks.Pattern | None:
    """What a token sees of its document, in numbers; None where the mask is not one of the usual ones."""
    if isinstance(mask, DocumentMask):
        return None if mask.absolute else mask.pattern
    return masks.Pattern(causal=is_causal(module, options)) if mask is None else None


def is_causal(module: torch.nn.Module, options: Mapping[str, Any]) -> bool:
    """How attention reads a missing mask: the call's `is_causal`, or else the module's."""
    told = options.get("is_causal")
    return bool(told if told is not None else getattr(module, "is_causal", True))

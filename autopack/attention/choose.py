"""Which backend computes a layer's attention: what may serve a model at all, and the choice at call time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopack.attention.backends import flash, flex, per_document, sdpa, varlen
from autopack.attention.call import AttentionCall, Backend
from autopack.errors import UnsupportedModel
from autopack.inspection import releases

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKENDS: dict[str, Backend] = {
    "flash": flash,
    "varlen": varlen,
    "flex": flex,
    "sdpa": sdpa,
    "eager": per_document,
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


def choose(requested: str, call: AttentionCall) -> str:
    """The backend for one attention call: the requested one, or the best that serves it. Raises `UnsupportedModel`."""
    if requested != "auto":
        reason = BACKENDS[requested].refusal(call)
        if reason is not None:
            raise UnsupportedModel(
                f"backend={requested!r} was asked for, but {type(call.module).__name__} cannot use it: {reason}. Use "
                f"backend='auto'."
            )
        return requested
    if releases.is_flash(call.implementation):
        return "flash"
    if call.implementation == "flex_attention":
        return "flex"
    if call.implementation == "sdpa":
        return "varlen" if varlen.refusal(call) is None and varlen.availability()[0] else "sdpa"
    return "eager"

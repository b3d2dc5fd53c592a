"""Choose the backend of a layer's attention: those that may serve a model, and one at call time."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import torch
from transformers import PreTrainedModel

from autopack.attention import backends
from autopack.attention.call import AttentionCall, Backend
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, releases, torches

BACKENDS: dict[str, Backend] = {
    found.name: import_module(f"{backends.__name__}.{found.name}").BACKEND
    for found in pkgutil.iter_modules(backends.__path__)
}
"""Backends that the user can ask for by name: the modules of `autopack.attention.backends`."""


def availability() -> dict[str, tuple[bool, str]]:
    """Return, for each backend, whether it can be used on this machine, and by what or why not."""
    return {name: backend.availability() for name, backend in BACKENDS.items()}


def candidates(implementation: str, model: PreTrainedModel) -> tuple[str, ...]:
    """Return the backends that may serve a model loaded with an implementation, the preferred one
    first."""
    declared = releases.supported_implementations(model)
    others = [
        backend
        for backend in BACKENDS.values()
        if implementation in backend.stands_in and backend.stands_in[implementation] in (None, *declared)
    ]
    first = [backend.name for backend in others if implementation in backend.goes_first]
    return *first, own_backend(implementation), *(b.name for b in others if b.name not in first)


def taken_by_auto(implementation: str, device: str) -> tuple[str, ...]:
    """Return the backends that `backend="auto"` may take for calls of an implementation on a kind
    of device."""
    first = [
        name
        for name, backend in BACKENDS.items()
        if implementation in backend.goes_first
        and (backend.devices is None or device in backend.devices)
        and backend.availability()[0]
    ]
    return *first, own_backend(implementation)


def choose(requested: str, call: AttentionCall) -> str:
    """Return the backend for one attention call: the requested one, or the best that serves it.

    Raises `UnsupportedModel` if none does.
    """
    own = own_backend(call.implementation)
    # The model's own eager attention reads no `is_causal`, flash attention no mask, and flex makes one in any case.
    if requested == "sdpa" or (own in ("sdpa", "eager") and call.implementation != "eager"):
        call.refuse_two_directions(requested)
    if requested != "auto":
        reason = BACKENDS[requested].refusal(call)
        if reason is not None:
            raise UnsupportedModel(
                f"backend={requested!r} was asked for, but {type(call.module).__name__} cannot use it: {reason}. Use "
                f"backend='auto'.",
                code="backend-unavailable",
            )
        return requested
    if not call.replaces_sdpa:
        for name, backend in BACKENDS.items():
            if own in backend.goes_first and backend.refusal(call) is None and backend.availability()[0]:
                return name
    if own != "flex" or torches.is_block_mask(call.mask):
        return own
    if isinstance(call.mask, torch.Tensor) or not masks.has_mask_interface():
        return "eager"  # a mask of the model's own is cut by documents, and no BlockMask is made of it
    return own


def own_backend(implementation: str) -> str:
    """Return the backend of an attention implementation; eager for unknown ones."""
    named = BACKENDS.get(implementation)
    if named is not None and named.is_own(implementation):
        return implementation
    for name, backend in BACKENDS.items():
        if backend.is_own(implementation):
            return name
    return "eager"

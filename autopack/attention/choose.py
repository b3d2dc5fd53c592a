"""The backends of attention, and those that may serve a model."""

from __future__ import annotations

from autopack.attention.call import EAGER, SDPA
from autopack.attention.kernels import FLASH, FLEX, VARLEN
from autopack.inspection import releases

BACKENDS = {backend.name: backend for backend in (EAGER, FLASH, FLEX, SDPA, VARLEN)}
"""Backends that the user can ask for by name."""


def availability() -> dict[str, tuple[bool, str]]:
    """Return {backend: (True if this machine can use it, by what or why not)}."""
    return {name: backend.availability() for name, backend in BACKENDS.items()}


def candidates(implementation: str) -> tuple[str, ...]:
    """Return the backends that may serve a model of an implementation, the preferred one first."""
    first = [name for name, backend in BACKENDS.items() if implementation in backend.stands_in]
    return *first, own_backend(implementation)


def taken_by_auto(implementation: str, device: str) -> tuple[str, ...]:
    """Return the backends that `backend="auto"` may take for an implementation on a device kind."""
    *first, own = candidates(implementation)
    there = [name for name in first if device in (BACKENDS[name].devices or (device,))]
    return *(name for name in there if BACKENDS[name].availability()[0]), own


def own_backend(implementation: str) -> str:
    """Return the name of an implementation's own backend; "eager" for unknown implementations."""
    if releases.is_flash(implementation):
        return "flash"
    return {"sdpa": "sdpa", "flex_attention": "flex"}.get(implementation, "eager")

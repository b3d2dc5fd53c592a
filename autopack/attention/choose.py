"""The backends of attention, and those that may serve a model."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from transformers import PreTrainedModel

from autopack.attention import backends
from autopack.attention.call import Backend
from autopack.inspection import releases

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
        if implementation in backend.goes_first and backend.runs_on(device) and backend.availability()[0]
    ]
    return *first, own_backend(implementation)


def own_backend(implementation: str) -> str:
    """Return the backend of an attention implementation; eager for unknown ones."""
    return next((name for name, backend in BACKENDS.items() if backend.is_own(implementation)), "eager")

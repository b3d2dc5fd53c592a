"""Eager attention, document by document: the model's own function, and any that a user has registered."""

from __future__ import annotations

from autopack.attention import per_document
from autopack.attention.backend import Backend

BACKEND = Backend(
    name="eager",
    attend=per_document.attend,
    availability=lambda: (True, "the model's own attention function"),
    implementations=lambda: ("eager",),
)

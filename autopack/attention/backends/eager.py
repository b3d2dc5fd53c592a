"""Eager attention, document by document: the model's own function, or any that the user
registered."""

from __future__ import annotations

from autopack.attention import per_document, prefixes
from autopack.attention.call import Backend

BACKEND = Backend(
    name="eager",
    attend=per_document.attend,
    over_prefixes=prefixes.by_stretches,
    availability=lambda: (True, "the model's own attention function"),
)

"""The attributes by which modules know the enabled model that they belong to."""

from __future__ import annotations

MARK = "_autopack"
"""Name of the attribute by which a module knows the enabled model that it belongs to."""
ACROSS = "_autopack_across"
"""Name of the attribute that tells cross-attention: it reads what the encoder has made."""

HANDLE = "_autopack_handle"
"""Name of the attribute by which an enabled model knows its handle."""

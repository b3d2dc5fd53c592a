"""Attention on packed rows: one module per backend, the choice between them, and the sites where they stand."""

from autopack.attention.choose import availability

__all__ = ["availability"]

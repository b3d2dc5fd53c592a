"""Proving a model that no record covers: by a tiny twin of it, and module by module."""

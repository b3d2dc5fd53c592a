"""Exhibits of models: one file each, found by `autopack.audit(model)`."""

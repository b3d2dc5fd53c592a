"""Exhibits of data and losses: one file each, found by `autopack.audit(trainer)`."""
